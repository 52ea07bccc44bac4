"""flash-kmeans (Apache-2.0): the assignment to clusters, by both distances and for small and large vectors."""

from inputs import calls_of, rand

PACKAGE = "flash-kmeans"
#: Batch, points, clusters, dimensions: the sizes of the package's benchmarks, smaller where they are large.
SHAPES = [
    (1, 65536, 256, 128),
    (8, 16384, 1024, 128),
    (1, 262144, 1024, 64),
    (32, 8192, 128, 128),
    (1, 32768, 4096, 256),
]
SHAPES += [(4, 65536, 512, 64), (1, 131072, 64, 128), (16, 4096, 2048, 64), (2, 50000, 1000, 96), (1, 20000, 8192, 128)]
#: These have more dimensions than one tile holds.
LARGE = [
    (1, 65536, 256, 768),
    (2, 16384, 1024, 1024),
    (1, 32768, 4096, 768),
    (8, 8192, 128, 2048),
    (1, 131072, 512, 1024),
]
LARGE += [
    (4, 4096, 2048, 1536),
    (1, 50000, 1000, 768),
    (1, 8192, 8192, 1024),
    (2, 32768, 64, 4096),
    (1, 20000, 300, 3072),
]


def assign(op, shape):
    import torch
    from flash_kmeans import assign_euclid_triton as package

    batch, points, clusters, size = shape
    x, centers = rand(batch, points, size), rand(batch, clusters, size)
    if op.startswith("euclid"):
        square = x.float().square().sum(-1)
        package.euclid_assign_triton(x, centers, square, use_heuristic=False)
    else:
        package.cosine_assign_triton(torch.nn.functional.normalize(x, dim=-1), centers)


def calls():
    return calls_of(assign, ["euclid"], SHAPES) | calls_of(assign, ["euclid_large", "cosine_large"], LARGE)
