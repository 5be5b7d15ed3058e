"""torch operators of rawmla, `torch.ops.rawmla.*`: what torch.compile, torch.export and fake tensors follow.

Importing this package registers them; it needs torch and no GPU. The public functions of rawmla take them
while torch traces, and only then, so programs import it for the operators themselves: to call them on CPU
tensors, or to load an exported program. docs/torch_operators.md says more.

`registration.py` is how an operator is registered, `mla.py` and `mha.py` have the operators, and
`mla_calls.py` and `mha_calls.py` have the call paths of public functions as calls of operators.
"""

from ..call import tracing
from . import mha as mha
from . import mla as mla

tracing.ask_torch()
