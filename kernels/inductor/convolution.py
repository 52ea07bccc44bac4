"""Inductor's convolution as a `Measurable` family, on layers of vision models.

The sizes of the layers are in the papers of the models: He et al. 2015 (ResNet), Radosavovic et al. 2020 (RegNet), Liu
et al. 2022 (ConvNeXt), Tan and Le 2019 (EfficientNet), Dosovitskiy et al. 2020 (ViT), Liu et al. 2021 (Swin), Rombach
et al. 2021 (Stable Diffusion: UNet and VAE), Podell et al. 2023 (SDXL), Simonyan and Zisserman 2014 (VGG), Ronneberger
et al. 2015 (U-Net), Huang et al. 2016 (DenseNet). torch and triton are imported when needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Problem, torch_dtype
from ..workloads import chosen
from .generated_family import GeneratedFamily, Inputs, draw_cases, log_uniform
from .templates import InductorConvolutionFamily

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .generated import GeneratedKernel, Operand

#: Layers by model: the side of the output image, input and output channels, the side of the filter, stride, groups.
LAYERS = {
    "ResNet-50": (
        (112, 3, 64, 7, 2, 1),
        (56, 64, 64, 3, 1, 1),
        (28, 128, 128, 3, 1, 1),
        (28, 256, 512, 1, 2, 1),
        (14, 256, 256, 3, 1, 1),
        (14, 256, 256, 3, 2, 1),
        (7, 512, 512, 3, 1, 1),
        (7, 1024, 2048, 1, 2, 1),
    ),
    "VGG-16": ((224, 64, 64, 3, 1, 1), (112, 128, 128, 3, 1, 1), (56, 256, 256, 3, 1, 1), (28, 512, 512, 3, 1, 1)),
    "RegNetY-16GF": ((56, 224, 224, 3, 1, 2), (28, 448, 448, 3, 1, 4), (14, 1232, 1232, 3, 1, 11)),
    "ConvNeXt-B": ((56, 3, 128, 4, 4, 1), (28, 128, 256, 2, 2, 1), (14, 256, 512, 2, 2, 1), (7, 512, 1024, 2, 2, 1)),
    "EfficientNet-B0": ((112, 3, 32, 3, 2, 1), (14, 480, 480, 5, 1, 480)),
    "ViT-L": ((14, 3, 1024, 16, 16, 1), (24, 3, 1024, 14, 14, 1)),
    "SwinB": ((56, 3, 128, 4, 4, 1),),
    "DenseNet-121": ((56, 128, 32, 3, 1, 1), (28, 128, 32, 3, 1, 1), (14, 128, 32, 3, 1, 1)),
    "UNet-2015": ((256, 64, 64, 3, 1, 1), (128, 128, 128, 3, 1, 1), (64, 256, 256, 3, 1, 1), (32, 512, 1024, 3, 1, 1)),
    "SDXL-UNet": (
        (128, 320, 320, 3, 1, 1),
        (64, 640, 640, 3, 1, 1),
        (32, 1280, 1280, 3, 1, 1),
        (32, 2560, 1280, 3, 1, 1),
    ),
    "StableDiffusion1-UNet": ((64, 4, 320, 3, 1, 1), (32, 640, 640, 3, 1, 1), (16, 1280, 1280, 3, 2, 1)),
    "VAE-KL": ((512, 128, 128, 3, 1, 1), (256, 256, 256, 3, 1, 1), (128, 512, 512, 3, 1, 1), (512, 128, 3, 3, 1, 1)),
}
#: Images of one call.
IMAGES = (1, 2, 8, 32, 128)
DTYPES = {"bf16": 0.5, "fp16": 0.5}
#: The share of calls whose channels are contiguous: Inductor converts the layout of most models.
CHANNELS_LAST = 0.75


class InductorConvolution(InductorConvolutionFamily, GeneratedFamily):
    """The family of Inductor's 2D convolution, with all that `foretune collect` needs.

    >>> from foretune.kernels import find_family
    >>> len(find_family("inductor:convolution").cases(random=3, per_layer=1))
    44
    """

    tolerances: ClassVar[Mapping[str, float]] = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}

    def draw(
        self, models: Path | str | None, max_tflop: float | None, *, tokens: Sequence[int] | None = None, **drawn: Any
    ) -> tuple[Case, ...]:
        """Return the cases that `cases` draws; `tokens` are numbers of images.

        Raises:
            ForetuneError: `models` is given.
        """
        if models is not None:
            raise ForetuneError(f"{self.name} has its own layers: it reads no file of models, but got {models}")
        layers = {
            f"{model}/{side}x{k}x{n}": partial(_of_layer, layer, tuple(tokens or IMAGES))
            for model, all_layers in LAYERS.items()
            for layer in all_layers
            for side, k, n, *_ in [layer]
        }
        return draw_cases(self, layers, _of_chance, max_tflop=max_tflop, **drawn)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the first config of Inductor's list that can run the problem."""
        for config in self.listed(problem):
            if self.supports(config, problem, device) is None:
                return config
        return super().default(problem, device)

    def operands(self, problem: Problem) -> dict[str, Operand]:
        """Return (shape, strides, dtype) of each of the kernel's tensors by name; its main output is "y"."""
        side, (height, width) = _side(problem), _filter(problem)
        rows = problem["m"] // problem["images"] // side
        groups, dtype = problem["groups"], torch_dtype(problem.dtype_name)
        is_last = "channels_last" in problem.flags

        def image(count: int, channels: int, rows: int, columns: int) -> Operand:
            plane = (1, columns * channels, channels) if is_last else (rows * columns, columns, 1)
            return (count, channels, rows, columns), (channels * rows * columns, *plane), dtype

        stride = problem["stride"]
        return {
            "X": image(problem["images"], groups * problem["k"], rows * stride, side * stride),
            "W": image(groups * problem["n"], problem["k"], height, width),
            "y": image(problem["images"], groups * problem["n"], rows, side),
        }

    def generate(self, problem: Problem, config: KernelConfig) -> GeneratedKernel:
        """Generate Inductor's kernel for a problem and a config."""
        from unittest.mock import patch

        import torch
        from torch._inductor import ir
        from torch._inductor.kernel import conv
        from torch._inductor.lowering import lowerings

        from .generated import lowered_kernel

        operands = self.operands(problem)
        shape, strides, dtype = operands["y"]
        layout = ir.FixedLayout(torch.device("cuda", 0), dtype, list(shape), list(strides))
        lower: Any = lowerings[torch.ops.aten.convolution.default]
        arguments = [problem["stride"]] * 2, _padding(problem), [1, 1], False, [0, 0], problem["groups"]
        with patch.object(conv, "conv_layout", lambda *_, **__: layout):  # without a device, torch has no cuDNN's
            return lowered_kernel(operands, lambda nodes: lower(*nodes.values(), None, *arguments), config)

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the result of the convolution in float32."""
        import torch

        x, w = (inputs.tensors[name].float() for name in ("X", "W"))
        problem = inputs.problem
        with torch.backends.cudnn.flags(allow_tf32=False):
            y = torch.nn.functional.conv2d(
                x, w, stride=problem["stride"], padding=_padding(problem), groups=problem["groups"]
            )
        return y

    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""
        from torch._inductor.kernel import conv

        return (conv.conv2d_template,)


def _side(problem: Problem) -> int:
    """Return the columns of an output image: the largest divisor of its pixels that makes it square or taller."""
    pixels = problem["m"] // problem["images"]
    return next(side for side in range(isqrt(pixels), 0, -1) if pixels % side == 0)


def _filter(problem: Problem) -> tuple[int, int]:
    """Return the rows and columns of the filter."""
    columns = next(side for side in range(isqrt(problem["window"]), 0, -1) if problem["window"] % side == 0)
    return problem["window"] // columns, columns


def _padding(problem: Problem) -> list[int]:
    """Return the padding for which the input is `stride` times as large as the output, in both directions."""
    return [side // 2 if side > problem["stride"] else 0 for side in _filter(problem)]


def _of_layer(layer: Sequence[int], images: Sequence[int], rng: np.random.Generator) -> Problem:
    side, k, n, window, stride, groups = layer
    return _problem(rng, int(rng.choice(images)), side, k // groups, n // groups, window, stride, groups)


def _of_chance(rng: np.random.Generator) -> Problem:
    side, images = log_uniform(rng, 7, 256), log_uniform(rng, 1, 128)
    k, n = (log_uniform(rng, 16, 1024, 8) for _ in range(2))
    return _problem(rng, images, side, k, n, int(rng.choice((3, 3, 5))), int(rng.choice((1, 1, 2))), 1)


def _problem(
    rng: np.random.Generator, images: int, side: int, k: int, n: int, window: int, stride: int, groups: int
) -> Problem:
    return Problem.of(
        "inductor_convolution",
        dtype=chosen(DTYPES, rng),
        flags=("channels_last",) if rng.uniform() < CHANNELS_LAST or window == 1 else (),
        groups=groups,
        images=images,
        m=images * side * side,
        n=n,
        k=k,
        window=window * window,
        stride=stride,
    )
