"""The host sides of the kernels: their variants, parameter structs, grids and launches.

A module belongs to one file of cuda_src/kernels, whose name it has, or to several that are launched together.
Others have no kernel of their own: `mla_sparse_prefill` composes kernels, `mla_cache_rows` has the cache
formats, `common` has what several share. All take device addresses and numbers, never arrays.

`operations` says which variants an operation of the library needs.
"""

from __future__ import annotations

from .operations import all_specs, default_specs

__all__ = ["all_specs", "default_specs"]
