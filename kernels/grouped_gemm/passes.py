"""The forward and backward pass of one call: plain tensors in and out, no autograd, no device synchronization.

Kernels that only some calls launch are imported where they are needed: Triton takes 2 ms to read the source of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...datasets import ForetuneError, KernelConfig, Problem
from ...runtime import Mode, stubbed
from ...runtime.launching.ahead import only_compiling
from ..op_calls import DTYPES, Call, ConfiguredLaunch, device_at, require
from ..op_choice import HowChosen
from .space import chunks_of, is_few
from .triton_kernels.launches import prepare_dw, prepare_gemm
from .triton_kernels.tiles import TileMap, sizes_of

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..launchers import Launch


class Shape(NamedTuple):
    """The sizes of one call; x has `rows` rows, or rows / topk if it is gathered."""

    rows: int
    groups: int
    n: int
    k: int


class Options(NamedTuple):
    """The options of a call, as `grouped_gemm` documents them."""

    topk: int = 1
    permute_x: bool = False
    permute_y: bool = False
    config: KernelConfig | None = None
    config_dx: KernelConfig | None = None
    config_dw: KernelConfig | None = None
    mode: str | None = None


class Needs(NamedTuple):
    """Whether each tensor argument of the op needs a gradient."""

    x: bool
    w: bool
    weights: bool
    bias: bool

    @classmethod
    def of(cls, needs: Sequence[bool]) -> Needs:
        """Return which gradients are needed, from autograd's `needs_input_grad`, in the order of the op's arguments."""
        x, w, _, _, weights, bias = needs[:6]
        return cls(x, w, weights, bias)


class Grads(NamedTuple):
    """The gradients of the op's tensor arguments; None for those that were not needed."""

    x: torch.Tensor | None = None
    w: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Step(Call[Shape]):
    """The launches of forward, dX and dW, shared by all calls of `grouped_gemm` of one shape on one device.

    Raises:
        ForetuneError: The mode does not exist, or a given config cannot run the problem.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, place: int, options: Options) -> None:
        super().__init__(shape)
        self.dtype, self.options = dtype, options
        self.device, self._place = device_at(place), place
        self.gpu = place if self.device.backend != "cpu" and stubbed() is None else None  # its index
        self._how = HowChosen.of(options.mode)
        self.mode = self._how.mode
        self.chunks = chunks_of(shape.rows, shape.n, shape.k, DTYPES[dtype], self.device)
        self._given = {
            "grouped_gemm_fwd": options.config,
            "grouped_gemm_dx": options.config_dx,
            "grouped_gemm_dw": options.config_dw,
        }
        self._launches: dict[str, ConfiguredLaunch] = {}
        is_free = options.config is None and self._how.is_free and not self.contents_checked
        #: Whether the kernel for a few rows computes the forward pass, and its launch after the first one.
        self.is_few, self.few = is_free and is_few(*shape[:3]), cast("Launch | None", None)
        for family, config in self._given.items():
            if config is not None and shape.groups and shape.k:  # else no kernel is launched
                self.launch_of(family)

    def elsewhere(self) -> bool:
        """Return whether the tensors are on a GPU other than the current one, to which launches would go."""
        return self.gpu is not None and self.gpu != torch.cuda.current_device()

    def problem(self, family: str) -> Problem:
        """Return the problem of one product (forward, dX or dW), by its family's name, as far as the host knows it."""
        permuted = {"permute_x": self.options.permute_x, "permute_y": self.options.permute_y}
        flags = tuple(name for name, is_set in permuted.items() if is_set)
        return Problem.of(family, dtype=DTYPES[self.dtype], flags=flags, **self.seen._asdict())

    def launch_of(self, family: str) -> ConfiguredLaunch:
        """Return the launcher of one product (forward, dX or dW) by its family's name; it is made on first use."""
        launch = self._launches.get(family)
        if launch is None:
            prepare = {
                "grouped_gemm_fwd": self._prepare_forward,
                "grouped_gemm_dx": self._prepare_dx,
                "grouped_gemm_dw": self._prepare_dw,
            }[family]
            given = self._given[family]
            launch = ConfiguredLaunch(self.problem(family), self._place, given, self._how, prepare)
            self._launches[family] = launch
        return launch

    def launch_few(self, x: torch.Tensor, group_sizes: torch.Tensor) -> Launch:
        """Return the launch of the forward pass by the kernel for a few rows, made on first use."""
        if self.few is None:
            from .triton_kernels.few_rows import prepare_few_rows

            topk, permute_x, permute_y, *_ = self.options
            sides: dict[str, Any] = {"gathers": permute_x, "divisor": topk, "scatters": permute_y}
            at = group_sizes.numel() - self.seen.groups
            self.few = prepare_few_rows(*self.seen, x_rows=len(x), sizes_at=at, **sides)
        return self.few

    def _prepare_forward(self, config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        """Return a function that launches the forward product with a config, for tensors like these."""
        topk, permute_x, permute_y, *_ = self.options
        sides: dict[str, Any] = {"gathers": permute_x, "divisor": topk, "scatters": permute_y}
        return prepare_gemm(*self.seen, config, device.sm_count, x_rows=len(tensors[0]), **sides)

    def _prepare_dx(self, config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
        """Return a function that launches the product dX (x's gradient) with a config."""
        rows, groups, n, k = self.seen
        sides = {"gathers": self.options.permute_y, "scatters": self.options.permute_x}
        return prepare_gemm(rows, groups, k, n, config, device.sm_count, x_rows=rows, transposed=True, **sides)

    def _prepare_dw(self, config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        """Return a function that launches the product dW (w's gradient) with a config, for tensors like these."""
        rows, groups, n, k = self.seen
        return prepare_dw(TileMap(tensors[3], rows, groups, *self.chunks), n, k, config, device.sm_count)


def saved_of(tensors: tuple[Any, ...], needs: Needs) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors to save for `backward`; x and w, which are large, are None unless a gradient needs them."""
    x, w, *others = tensors
    return x if needs.w or needs.weights else None, w if needs.x or needs.weights else None, *others


def forward(
    step: Step,
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """Launch the forward pass of `grouped_gemm`, and return y, (rows, N).

    `indices` are its `gather_indices`, `weights` its `topk_weights`. Rows that belong to no group are uninitialized, or
    zero if contents are checked (FORETUNE_CHECK), or if `group_sizes` is a routing from `route` and permute_y is set.
    `options` are not used: `step` has them.
    """
    if step.elsewhere():
        with torch.cuda.device(step.gpu):
            return forward(step, x, w, group_sizes, indices, weights, bias)
    check_aligned(x, w)
    rows, groups, n, _ = step.seen
    if step.contents_checked:
        check_contents(group_sizes, indices, rows)
    y = x.new_empty(rows, n)
    if rows and groups:
        if not (step.options.permute_x or step.options.permute_y):
            indices = None
        if step.is_few:
            step.launch_few(x, group_sizes)((x, w, y, group_sizes, indices, weights, bias))
            return y
        tile_map = TileMap.build(group_sizes, rows)
        step.launch_of("grouped_gemm_fwd").here((x, w, y, tile_map.entries, indices, weights, bias))
        if step.contents_checked or (step.options.permute_y and group_sizes.dim() == 2):
            from .triton_kernels.ungrouped import zero_ungrouped

            zero_ungrouped(y, tile_map, indices if step.options.permute_y else None)
    elif step.contents_checked:
        y.zero_()
    return y


def backward(
    step: Step,
    needs: Needs,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor | None,
    group_sizes: torch.Tensor,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Grads:
    """Launch the backward pass of `grouped_gemm` for the gradient `dy` of y, and return the needed gradients.

    The gradient of x is zero in rows that belong to no group. The other arguments are as for `forward`; x and w
    may be None if `saved_of` leaves them out.
    """
    if step.elsewhere():
        with torch.cuda.device(step.gpu):
            return backward(step, needs, dy, x, w, group_sizes, indices, weights, bias)
    rows, groups, _, _ = step.seen
    dy = dy.contiguous()
    if dy.data_ptr() % 16:
        dy = dy.clone()
    if not (rows and groups):
        return _nothing(step, dy, weights, bias, needs)
    tile_map = TileMap.build(group_sizes, rows, *(step.chunks if needs.w else ()))
    dx = dw = dweights = dbias = None
    if needs.weights or needs.bias or (needs.x and step.options.permute_x):
        from .triton_kernels.rowwise import bias_grads, sum_rows, weight_grads
    if needs.x:
        from .triton_kernels.ungrouped import zero_ungrouped
    if needs.x or needs.weights:
        assert w is not None
        # The gradient of topk_weights is computed from the unweighted dx, so dx is multiplied by the weights
        # afterwards: in the same kernel, or in that which adds up its rows.
        dx = dy.new_empty(rows, step.seen.k)
        scale = None if needs.weights else weights
        step.launch_of("grouped_gemm_dx").here((dy, w, dx, tile_map.entries, indices, scale, None))
        if needs.weights:
            assert x is not None
            assert weights is not None
            dweights = weight_grads(dx, x, dy, bias, tile_map, indices, weights, *step.options[:3])
        if not needs.x:
            dx = None
        elif step.options.permute_x:  # dx has one row for each of the topk rows of a token
            zero_ungrouped(dx, tile_map, indices)
            dx = sum_rows(dx, step.options.topk, weights if needs.weights else None)
        else:
            zero_ungrouped(dx, tile_map)
    if needs.w:
        assert x is not None
        dw = _dw(step, dy, x, tile_map, indices, weights)
    if needs.bias:
        assert bias is not None
        dbias = bias_grads(dy, weights, tile_map, indices, step.options.permute_y, bias.dtype)
    return Grads(dx, dw, dweights, dbias)


def compile_step(step: Step, needs: Sequence[bool], *arguments: Any) -> None:
    """Compile in parallel the kernels of the forward pass, and of the backward pass if gradients are needed.

    Called for the first step of a shape, whose kernels would otherwise be compiled one after another. Kernels that are
    compiled already are left alone, and the tensors are not read.
    """
    if step.mode is Mode.SHORTLIST or step.contents_checked or step.device.backend == "cpu":
        return  # these need the tensors' contents; the interpreter has no binaries
    if TileMap.has_binary() and not any(needs):
        return  # at most the GEMM is missing, so there is nothing to compile in parallel
    empty: list[Any] = [
        tensor if tensor is None else torch.empty_like(tensor, device="meta") for tensor in arguments[:6]
    ]
    with suppress(Exception), only_compiling():  # the launches themselves will report errors
        y = forward(step, *empty)
        if any(needs):
            of_grads = Needs.of(needs)
            backward(step, of_grads, y, *saved_of(tuple(empty), of_grads))  # type: ignore[arg-type]


def _dw(
    step: Step,
    dy: torch.Tensor,
    x: torch.Tensor,
    tile_map: TileMap,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Launch dW and return dy.T @ x of each group, (groups, N, K), with the rows of dy times the weights.

    `indices` are the `gather_indices` of `grouped_gemm`.
    """
    _, groups, n, k = step.seen
    permute_x, permute_y = step.options.permute_x, step.options.permute_y
    if permute_x or permute_y:
        from .triton_kernels.sorting import sorted_rows
    elif weights is not None:
        from .triton_kernels.rowwise import sum_rows
    # The weights scale rows, so they can be applied to either operand: to the one that is copied anyway, or the
    # narrower one.
    if permute_x:
        assert indices is not None
        x = sorted_rows(x, indices, step.options.topk, weights)
    elif permute_y:
        assert indices is not None
        dy = sorted_rows(dy, indices, scale=weights)
    elif weights is not None and n <= k:
        dy = sum_rows(dy, scale=weights)
    elif weights is not None:
        x = sum_rows(x, scale=weights)
    dw = torch.empty((groups, n, k), dtype=x.dtype, device=x.device)

    step.launch_of("grouped_gemm_dw").here((dy, x, dw, tile_map.entries))
    return dw


def _nothing(
    step: Step,
    dy: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    needs: Needs,
) -> Grads:
    """Return zeros as the needed gradients of a call whose rows belong to no group."""
    rows, groups, n, k = step.seen
    tokens = rows // step.options.topk if step.options.permute_x else rows
    return Grads(
        dy.new_zeros(tokens, k) if needs.x else None,
        dy.new_zeros(groups, n, k) if needs.w else None,
        torch.zeros_like(weights) if needs.weights and weights is not None else None,
        torch.zeros_like(bias) if needs.bias and bias is not None else None,
    )


def check_aligned(x: torch.Tensor, w: torch.Tensor) -> None:
    """Check that x and w begin at multiples of 16 bytes, which TMA and vector loads require.

    Raises:
        ForetuneError: x or w does not.
    """
    if (x.data_ptr() | w.data_ptr()) % 16:
        name = "x" if x.data_ptr() % 16 else "w"
        raise ForetuneError(
            f"{name} must begin at an address that is a multiple of 16 bytes, but this view does not: "
            f"pass {name}.clone()"
        )


def check_contents(group_sizes: torch.Tensor, gather_indices: torch.Tensor | None, rows: int) -> None:
    """Check group sizes and indices on the device, and wait for it. Rows past the last group are allowed.

    Raises:
        ForetuneError: A size is negative, sizes sum to more than `rows`, or indices are no permutation.
    """
    sizes = sizes_of(group_sizes).tolist()
    require(min(sizes, default=0) >= 0, f"group_sizes must be >= 0 but contains {min(sizes, default=0)}")
    require(sum(sizes) <= rows, f"group_sizes must sum to at most {rows}, the number of rows, but sum to {sum(sizes)}")
    if gather_indices is not None:
        in_order = gather_indices.sort().values
        expected = torch.arange(rows, device=gather_indices.device, dtype=gather_indices.dtype)
        wrong = (in_order != expected).nonzero().flatten().tolist()
        if wrong:
            raise ForetuneError(
                f"gather_indices must contain each of 0 to {rows - 1} once, but entry {wrong[0]} of the sorted indices "
                f"is {int(in_order[wrong[0]])}"
            )
