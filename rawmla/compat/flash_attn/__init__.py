"""The modules of flash-attn as rawmla gives them: `rawmla.install_flash_attn` says how programs get them.

`fa2` is `flash_attn`, `fa3` is `flash_attn_interface` and `flash_attn_3`, `fa4` is `flash_attn.cute`. The
folder `rawmla/compat/flash_attn_site` has packages of these names that re-export them. Importing one needs
torch and no GPU, compiles nothing and does not initialise CUDA.
"""
