"""adasplash (MIT): sparse attention, and two versions of entmax, forward and backward."""

from inputs import backward, calls_of, rand

PACKAGE = "adasplash"
#: Batch, heads, length, size of a head.
SHAPES = [(1, 16, 4096, 64), (4, 12, 1024, 64), (1, 32, 4096, 128), (2, 8, 8192, 64), (8, 16, 512, 64)]
SHAPES += [(1, 8, 16384, 64), (2, 16, 2048, 128), (1, 8, 8192, 128), (4, 16, 1024, 128), (8, 8, 512, 128)]
#: Rows and columns.
ROWS = [(8192, 1024), (4096, 4096), (1024, 32000), (16384, 512), (2048, 8192), (512, 50304), (32768, 256), (4096, 2048)]
ROWS += [(1024, 16384), (256, 128256)]


def attention(op, shape):
    import adasplash

    backward(adasplash.adasplash_v2(*(rand(*shape, grad=True) for _ in range(3))))


def rows(op, shape):
    import adasplash

    x = rand(*shape, dtype="float32", grad=True)
    backward(adasplash.triton_entmax_v1(x) if op == "entmax_v1" else adasplash.triton_entmax_v2(x))


def calls():
    return calls_of(attention, ["attention"], SHAPES) | calls_of(rows, ["entmax_v1", "entmax_v2"], ROWS)
