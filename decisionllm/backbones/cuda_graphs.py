"""Training on a GPU by recorded kernels: CUDA graphs of the blocks of a backbone.

A training step of a language model starts thousands of small kernels, and the processor needs
longer to start them than the GPU to run them. A CUDA graph is the list of the kernels of one
forward or backward pass, recorded once and then started as a whole, for tensors of the same shapes.
Texts are padded, so that few shapes occur.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

# (tokens, states of texts, their mask, text_index, output positions) -> hidden states, see
# `forward.Backbone.read_rows`
ReadRows = Callable[[Tensor, Tensor, Tensor, Tensor, slice], Tensor]
TEXTS = 16  # texts are padded to a multiple of so many
WORDS = 8  # and each to a multiple of so many tokens
MOST_SHAPES = 32  # of which graphs are kept; further shapes are read without


class CUDAGraphReader:
    """Reads the rows of a training step by CUDA graphs.

    A graph writes its results to the same memory each time. So a call is read without one while the
    backward pass of the call before has still to run; and so are calls outside of a training, and
    those of a model that trains its word embeddings.

    Args:
        backbone: on a GPU.
        read: of the backbone, `Backbone.read_rows`, which is recorded.
    """

    def __init__(self, backbone: nn.Module, read: ReadRows) -> None:
        self.backbone = backbone
        self.read = read
        self.trained = {
            name: weight for name, weight in backbone.named_parameters() if weight.requires_grad
        }
        self.graphs: dict[object, Callable[..., Tensor]] = {}  # by shapes
        self.memory = torch.cuda.graph_pool_handle()  # of all graphs: no two run at a time
        self.waiting = False  # for the backward pass of the last call

    def __call__(
        self, tokens: Tensor, states: Tensor, text_mask: Tensor, text_index: Tensor, output: slice
    ) -> Tensor:
        trains = self.backbone.training and tokens.requires_grad
        if self.waiting or not trains or states.requires_grad:
            return self.read(tokens, states, text_mask, text_index, output)
        states, text_mask = pad_texts(states, text_mask)
        inputs = tokens, states, text_mask, text_index
        shapes = (*(x.shape for x in inputs), output.start, output.stop, output.step)
        if shapes not in self.graphs:
            if len(self.graphs) == MOST_SHAPES:
                return self.read(*inputs, output)
            self.graphs[shapes] = self._record(inputs, output)
        self._copy_gradients()
        hidden = self.graphs[shapes](*inputs, *self.trained.values())
        self.waiting = True
        hidden.register_hook(self._stop_waiting)
        return hidden

    def _stop_waiting(self, gradient: Tensor) -> None:
        self.waiting = False

    def _copy_gradients(self) -> None:
        """Copy the gradients of a micro-batch before, which are in the memory of a graph."""
        for weight in self.trained.values():
            if weight.grad is not None:
                weight.grad = weight.grad.clone()

    def _record(self, inputs: Sequence[Tensor], output: slice) -> Callable[..., Tensor]:
        """Record a graph of these shapes: (inputs, trained weights) -> hidden states."""
        rows = _Rows(self.backbone, self.read, output)
        names = [f"backbone.{name}" for name in self.trained]
        n = len(inputs)

        def read(*tensors: Tensor) -> Tensor:
            weights = dict(zip(names, tensors[n:], strict=True))
            hidden: Tensor = functional_call(rows, weights, tensors[:n])
            return hidden

        samples = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        # Other tensors of the same memory: nothing is copied into them when the graph starts, and
        # torch's own nodes of the weights, which belong to another stream, have no part in it.
        samples += [weight.detach().requires_grad_() for weight in self.trained.values()]
        # casts that autocast keeps for later would not be part of a graph
        casts = torch.autocast(
            "cuda",
            torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        with casts, warnings.catch_warnings():
            # of recording on a stream of its own, once; its gradients are equal, see the tests
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
            recorded: Any = torch.cuda.make_graphed_callables(
                read, tuple(samples), allow_unused_input=True, pool=self.memory
            )
        return recorded  # type: ignore[no-any-return]


class _Rows(nn.Module):
    """`Backbone.read_rows` as a module, whose weights can be exchanged."""

    def __init__(self, backbone: nn.Module, read: ReadRows, output: slice) -> None:
        super().__init__()
        self.backbone = backbone
        self.read = read
        self.output = output

    def forward(
        self, tokens: Tensor, states: Tensor, text_mask: Tensor, text_index: Tensor
    ) -> Tensor:
        return self.read(tokens, states, text_mask, text_index, self.output)


def pad_texts(states: Tensor, text_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pad states of texts (U, L, D) and their mask (U, L) by texts and tokens that no row attends
    to.
    """
    U, L = text_mask.shape
    texts = -U % TEXTS
    words = -L % WORDS
    return F.pad(states, (0, 0, 0, words, 0, texts)), F.pad(text_mask, (0, words, 0, texts))
