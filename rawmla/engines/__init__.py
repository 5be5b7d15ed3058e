"""rawmla inside serving engines: plug-ins of vLLM and SGLang, and `python -m rawmla doctor`.

`vllm` and `sglang` hold the entry points that the engines call in every process; they do nothing unless an
environment variable requests it (docs/engines.md). Nothing here is needed to call rawmla's own functions.
"""
