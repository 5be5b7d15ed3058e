"""The backward of the libraries of `peers`, by autograd, on the same inputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import peers
from .columns import CUDNN
from .peers import Call, Peer


def _check_dense(case: Any, inputs: Any, gradients: Any) -> None:
    from .mha_backward_measure import check_gradients

    check_gradients(case, inputs, gradients)


def _check_flex(case: Any, inputs: Any, gradients: Any) -> None:
    from .flex_backward_measure import check_gradients

    check_gradients(case, inputs, gradients)


def _backward_of(peer: Peer, check: Callable[[Any, Any, Any], None]) -> Peer:
    """The gradients of q, k and v by a peer whose calls return out, or a tuple that begins with it. They are
    checked as ours are.
    """

    def calls(case: Any, inputs: Any) -> list[Call]:
        import torch
        from torch._functorch import config

        q, k, v = (array.detach().requires_grad_() for array in (inputs.q, inputs.k, inputs.v))
        dout = inputs.dout.transpose(1, 2) if peer.name == CUDNN else inputs.dout
        results: dict[Any, Any] = {}  # by stream: autograd enqueues a backward where its forward ran
        # Else the backward of a compiled forward may overwrite what it reads, and runs once; autograd stays
        # in this thread, which alone has the setting.
        with config.patch(donated_buffer=False):
            (forward,) = peer.calls(case, replace(inputs, q=q, k=k, v=v))

        def call(_: int) -> Any:
            stream = torch.cuda.current_stream()
            with config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
                if stream not in results:
                    result = forward(0)
                    results[stream] = result[0] if isinstance(result, tuple) else result
                return torch.autograd.grad(results[stream], (q, k, v), dout, retain_graph=True)

        check(case, inputs, call(0))
        return [call]

    return replace(peer, calls=calls)


MHA = tuple(_backward_of(peer, _check_dense) for peer in peers.MHA)
FLEX = tuple(_backward_of(peer, _check_flex) for peer in peers.FLEX)
