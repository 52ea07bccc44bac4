"""spconv-triton (Apache-2.0): sparse convolutions and pooling of point clouds, forward and backward."""

from inputs import backward, calls_of, integers, rand

PACKAGE = "spconv-triton"
#: Voxels, grid, channels in and out, kernel size: the layers of SECOND, CenterPoint and PTv3 backbones.
SHAPES = [(60000, 512, 16, 16, 3), (60000, 256, 32, 32, 3), (40000, 256, 64, 64, 3), (20000, 128, 128, 128, 3)]
SHAPES += [(100000, 512, 32, 64, 3), (30000, 256, 64, 128, 3), (120000, 512, 64, 64, 5), (15000, 128, 256, 256, 3)]
SHAPES += [(80000, 512, 48, 48, 3), (50000, 256, 96, 96, 3), (8000, 64, 512, 512, 3)]
OPS = ("SubMConv3d", "SparseConv3d", "SparseMaxPool3d", "SparseAvgPool3d")


def call(op, shape):
    import spconv_triton.pytorch as spconv
    import torch

    voxels, grid, channels, out, size = shape
    places = integers(2 * 16 * grid * grid, 2 * voxels, dtype="int64").unique()[:voxels]
    places = torch.stack(
        [places // (16 * grid * grid), places // grid**2 % 16, places // grid % grid, places % grid], 1
    )
    x = spconv.SparseConvTensor(
        rand(len(places), channels, dtype="float16", grad=True), places.int(), [16, grid, grid], 2
    )
    kind = getattr(spconv, op)
    if "Pool" in op:
        layer = kind(size, stride=2)
    else:
        layer = kind(channels, out, size, stride=1 if op == "SubMConv3d" else 2, padding=size // 2).cuda().half()
    backward(layer(x).features)


def calls():
    return calls_of(call, OPS, SHAPES)
