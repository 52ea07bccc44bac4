"""fla-core (MIT): its ops, forward and backward, with sizes that the models of fla have."""

import importlib

from inputs import backward, calls_of, rand

PACKAGE = "fla-core"
#: Batch, time, heads, key and value size of a head.
SHAPES = [(8, 2048, 4, 128, 256), (4, 2048, 16, 128, 128), (2, 4096, 32, 64, 64), (1, 8192, 32, 128, 128)]
SHAPES += [(4, 2048, 8, 64, 128), (2, 2048, 4, 256, 256), (8, 1024, 12, 64, 64), (4, 4096, 6, 128, 256)]
SHAPES += [(2, 8192, 16, 64, 128), (1, 4096, 24, 128, 128), (4, 1024, 4, 64, 256), (2, 2048, 40, 64, 64)]
#: Arguments of each op after q, k and v: axes, then - for the log of a sigmoid, + a sigmoid, ~ normalized.
OPS = """gla.chunk_gla g=BTHK-; kda.chunk_kda g=BTHK- beta=BTH+; gsa.chunk_gsa s=BTHS g=BTHS-; abc.chunk_abc s=BTHS;
gated_delta_rule.chunk_gated_delta_rule g=BTH- beta=BTH+; simple_gla.parallel_simple_gla g=BTH-;
gdn2.chunk_gdn2 g=BTHK- b=BTHK+ w=BTHV+; rwkv6.chunk_rwkv6 r=BTHK w=BTHK- u=HK; hgrn.chunk_hgrn x=BTD g=BTD-;
generalized_delta_rule.chunk_dplr_delta_rule a=BTHK~ b=BTHK~ gk=BTHK-; stickbreaking_attn.parallel_stickbreaking_attn;
gated_oja_rule.chunk_gated_oja_rule gv=BTHV- beta=BTH+; wall_attn.parallel_wall_attn g=BTHK-; retention.chunk_retention;
comba.chunk_comba p=BTHK~ g=BTH- beta=BTH+; precond_kda.chunk_precond_kda g=BTHK- g_atk=BTH- beta_atk=BTH+ beta=BTH+;
delta_rule.chunk_delta_rule beta=BTH+; ttt.fused_chunk_ttt_linear v=BTHK w=HK b=HK eta=BTH1+; lightnet.chunk_lightnet;
log_linear_attn.chunk_log_linear_attn g=BTH- level_scales=BTHL+; mesa_net.chunk_mesa_net v=BTHK g=BTH- beta=BTH+
lamb=HK+; rwkv6.fused_recurrent_rwkv6 r=BTHK w=BTHK- u=HK; rwkv7.fused_mul_recurrent_rwkv7 r=BTHK w=BTHK- kk=BTHK~
a=BTHK+; precond_gated_delta_rule.chunk_precond_gated_delta_rule g_atk=BTH- g=BTH- beta_atk=BTH+ beta=BTH+;
hgrn.fused_recurrent_hgrn x=BTD g=BTD-; simple_gla.fused_chunk_simple_gla g=BTH-; ttt.chunk_ttt_linear v=BTHK w=HK b=HK
eta=BTH1+; generalized_delta_rule.chunk_iplr_delta_rule a=BTHK~ b=BTHK~; utils.mean_pooling x=BTHV chunk_size=64"""
OPS = {op: dict(one.split("=") for one in given) for op, *given in map(str.split, OPS.split(";"))}


def call(op: str, shape) -> None:
    sizes = dict(zip("BTHKV", shape, strict=True), S=64, L=16, D=shape[2] * shape[3]) | {"1": 1}
    signs = {
        "-": lambda x: x.float().sigmoid().log(),
        "+": lambda x: x.sigmoid(),
        "~": lambda x: x / x.norm(dim=-1)[..., None],
    }
    given = ({} if "x" in OPS[op] else {"k": "BTHK~", "v": "BTHV"} | ({} if "r" in OPS[op] else {"q": "BTHK"})) | OPS[
        op
    ]
    values = {
        name: rand(*(sizes[axis] for axis in kind.rstrip("-+~"))) for name, kind in given.items() if kind[0] in "BH"
    }
    values = {name: signs.get(given[name][-1], lambda x: x)(x).requires_grad_(True) for name, x in values.items()}
    values |= {name: int(kind) for name, kind in given.items() if name not in values}
    backward(getattr(importlib.import_module(f"fla.ops.{op.split('.')[0]}"), op.split(".")[1])(**values))


def calls():
    return calls_of(call, OPS, SHAPES)
