from rawmla.compat.flash_attn.rotary import apply_rotary as apply_rotary
