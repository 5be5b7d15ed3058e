// What a block of a mask is: a byte of an array [batch, head, row, column].
#pragma once

enum BlockState : unsigned char { kEmpty = 0, kPartial = 1, kFull = 2 };
