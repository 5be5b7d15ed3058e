"""Where the bits of a prompt's activations part between two batches: checksums of every module's output.

Each forward pass of the model is recorded as one checksum for every module and token. A prompt that is run
alone is then looked up in the passes of a batch by token and position. The first module whose rows differ is
the one at fault: all modules before it had equal inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

Output = tuple[str, int]
"""A module's name, and how many outputs it had before this one in the same pass."""


class Forward(NamedTuple):
    """One forward pass: a token and its position in each row; checksums [rows] of outputs in call order."""

    tokens: list[int]
    positions: list[int]
    sums: dict[Output, list[int]]


class Recorder:
    """Hooks that record forward passes, without graphs."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Any, Any]] = []
        self.sums: list[dict[Output, Any]] = []
        self.rows = 0  # of the pass that runs; the head and the sampler run between passes

    def attach(self, model: Any) -> None:
        """Watch a model and all of its modules."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(lambda _, given, output, name=name: self._note(name, output))

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        self.inputs.append((given["input_ids"].clone(), given["positions"].clone()))
        self.sums.append({})
        self.rows = len(self.inputs[-1][0])

    def _end(self, *given: Any) -> None:
        self.rows = 0

    def _note(self, name: str, output: Any) -> None:
        import torch

        for values in output if isinstance(output, tuple) else (output,):
            if isinstance(values, torch.Tensor) and values.dim() > 1 and 0 < len(values) == self.rows:
                sums = self.sums[-1]
                number = next(number for number in count() if (name, number) not in sums)
                sums[name, number] = checksums(values)

    def take(self) -> list[Forward]:
        """The passes since the last call."""
        passes = zip(self.inputs, self.sums, strict=True)
        taken = [
            Forward(ids.tolist(), positions.tolist(), {key: values.tolist() for key, values in sums.items()})
            for (ids, positions), sums in passes
        ]
        self.inputs, self.sums = [], []
        return taken


def checksums(values: Any) -> Any:
    """An integer for each row of a tensor that depends on all of its bits."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.contiguous().view(kinds[values.element_size()]).reshape(len(values), -1).long()
    factors = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 0x9E3779B97F4A7C1 + 1
    return (bits * (2 * factors + 1)).sum(1)


def origin(alone: Sequence[Forward], batch: Sequence[Forward]) -> dict[str, Any] | None:
    """The first module of a prompt's own passes with other bits than in the batch; None: there is none.

    Rows of the batch with the same token at the same position as another request's are left out, and so are
    modules whose output in the batch lacks rows: modules of prefill run without the decoding requests.
    """
    places: dict[tuple[int, int], list[tuple[Forward, int]]] = defaultdict(list)
    for forward in batch:
        for row, key in enumerate(zip(forward.tokens, forward.positions, strict=False)):
            places[key].append((forward, row))
    for number, forward in enumerate(alone):
        keys = zip(forward.tokens, forward.positions, strict=False)
        pairs = [(row, places[key][0]) for row, key in enumerate(keys) if len(places[key]) == 1]
        for output, sums in forward.sums.items():
            different = [
                forward.positions[row]
                for row, (other, at) in pairs
                if output in other.sums and other.sums[output][at] != sums[row]
            ]
            if different:
                rows = {"rows": len(different), "compared": len(pairs), "position": different[0]}
                return {"module": output[0], "forward": number, **rows}
    return None
