from rawmla.compat.flash_attn.bert_padding import *  # noqa: F403
from rawmla.compat.flash_attn.bert_padding import __all__ as __all__
from rawmla.compat.flash_attn.bert_padding import __getattr__ as __getattr__
