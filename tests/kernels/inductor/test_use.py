"""`foretune.use("inductor")` in the Inductor that is installed: real lowerings, up to where choices would be timed."""

from __future__ import annotations

import threading

import foretune
import pytest
import torch
from foretune import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.inductor import choices as listed
from foretune.kernels.inductor.choices import GROWTH, caller_config, caller_problem, mm_config, multiplies_as_tf32
from foretune.kernels.inductor.generated import product_kernel
from foretune.kernels.integrations import inductor
from foretune.runtime import use_stub_driver
from lowered import lowered, tensor

pytestmark = pytest.mark.compile
H200 = DeviceSpec.named("h200")
A, B = tensor(256, 512), tensor(512, 1024)
OPS = {
    "mm": (torch.mm, A, B),
    "addmm": (torch.addmm, tensor(1024), A, B),
    "bmm": (torch.bmm, tensor(4, 256, 512), tensor(4, 512, 1024)),
    "scaled_mm": (
        lambda a, b, a_scale, b_scale: torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16),
        tensor(256, 512, dtype=torch.float8_e4m3fn),
        tensor(1024, 512, dtype=torch.float8_e4m3fn).t(),
        tensor(256, 1, dtype=torch.float32),
        tensor(1, 1024, dtype=torch.float32),
    ),
    "convolution": (torch.nn.functional.conv2d, tensor(8, 64, 32, 32), tensor(128, 64, 3, 3)),
}


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Inductor, which takes seconds to import: where these tests run, and not wherever they are collected."""
    global benchmarker, config, select_algorithm, InductorChoices
    from torch._inductor import config, select_algorithm
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.benchmarking import benchmarker


def seams():
    cache = select_algorithm.get_algorithm_selector_cache()
    limits = InductorChoices._finalize_template_configs, config.inductor_choices_class, cache.preprocessing_fns[:]
    return *limits, benchmarker.benchmark_gpu, dict(vars(benchmarker))


def with_tile(choices):
    return [choice for choice in choices if not isinstance(choice, select_algorithm.ExternKernelCaller)]


@pytest.mark.parametrize("op", OPS)
def test_as_many_choices_of_an_op_are_left_and_the_extern_ones(op):
    (listed,), _ = lowered(*OPS[op], max_autotune_gemm_search_space="DEFAULT")
    with foretune.use("inductor", k=2):
        (limited,), _ = lowered(*OPS[op], max_autotune_gemm_search_space="DEFAULT")
    (again,), _ = lowered(*OPS[op], max_autotune_gemm_search_space="DEFAULT")
    assert len(with_tile(listed)) > len(with_tile(limited)) == 2
    assert len(listed) - len(with_tile(listed)) == len(limited) - len(with_tile(limited)) >= 1
    assert [str(choice.description) for choice in again] == [str(choice.description) for choice in listed]


@pytest.mark.parametrize("op", OPS)
def test_with_k_1_one_choice_is_left_and_nothing_is_timed(op):
    with foretune.use("inductor", k=1):
        (choices,), _ = lowered(*OPS[op])
    assert len(choices) == 1
    assert not with_tile(choices)  # 256 rows, and convolutions, are ATen's


@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_with_k_1_few_rows_run_the_template_ranked_first(op):
    function, *given = OPS[op]
    rows = [tensor(8, *one.shape[1:], dtype=one.dtype) if one.shape[0] == 256 else one for one in given]
    with foretune.use("inductor", k=1):
        ((choice,),), _ = lowered(function, *rows)
    with foretune.use("inductor", k=2):
        (two,), _ = lowered(function, *rows)
    assert mm_config(choice.annotations["ktc"]) == mm_config(with_tile(two)[0].annotations["ktc"])


def test_with_k_1_products_that_no_template_predicts_are_atens():
    for dtype in (torch.float64, torch.float32):  # unknown, and never compared
        with foretune.use("inductor", k=1):
            ((choice,),), _ = lowered(torch.mm, tensor(8, 512, dtype=dtype), tensor(512, 1024, dtype=dtype))
        assert not with_tile([choice])


def test_with_k_1_templates_run_where_aten_is_not_configured():
    with foretune.use("inductor", k=1):
        ((choice,),), _ = lowered(torch.mm, A, B, max_autotune_gemm_backends="TRITON")
    assert with_tile([choice])


def automatic(function, *tensors):
    """How many templates an automatic k leaves of each product, and how many choices there are."""
    with foretune.use("inductor", k="auto"):
        ops, _ = lowered(function, *tensors)
    return [(len(with_tile(choices)), len(choices)) for choices in ops]


def test_an_automatic_k_keeps_few_templates_for_few_rows_and_fewer_where_the_ranker_is_certain():
    sizes = ((1, 1024, 1024), (8, 8192, 512), (48, 28672, 4096), (64, 4096, 4096), (128, 1024, 1024))
    left = [automatic(torch.mm, tensor(m, k), tensor(k, n))[0] for m, n, k in sizes]
    assert all(templates + 1 == choices for templates, choices in left)  # and ATen's
    assert max(templates for templates, _ in left) <= listed.MOST
    assert len({templates for templates, _ in left}) > 1


def test_an_automatic_k_leaves_many_rows_to_aten():
    x, w, bias = tensor(8192, 1024), tensor(1024, 4096), tensor(4096)
    assert automatic(torch.mm, x, w) == automatic(torch.addmm, bias, x, w) == [(0, 1)]
    assert automatic(lambda x, w: torch.nn.functional.gelu(x @ w), x, w) == [(0, 1)]


@pytest.mark.parametrize("k", [1, "auto"])
def test_an_addmm_that_is_left_to_aten_is_that_of_the_default_mode(k):
    x, w, row = tensor(8192, 1024), tensor(1024, 4096), tensor(4096)
    expanded = lambda row, x, w: torch.addmm(row.expand(8192, 4096), x, w)  # noqa: E731
    with foretune.use("inductor", k=k):
        for function, bias in ((torch.addmm, row), (expanded, row), (torch.addmm, tensor(8192, 4096))):
            ((choice,),), _ = lowered(function, bias, x, w)
            assert choice.name == "addmm"
            assert [int(size) for size in choice.input_nodes[0].get_size()] == list(bias.shape)


def test_an_automatic_k_times_what_was_never_compared_with_aten():
    for dtype in (torch.bfloat16, torch.float32):
        tensors = tensor(256, 512, 64, dtype=dtype), tensor(256, 64, 512, dtype=dtype)
        ((templates, choices),) = automatic(torch.matmul, *tensors)
        assert 0 < templates < choices
    rotary = tensor(64, 1, dtype=torch.float32), tensor(1, 2048, dtype=torch.float32)
    assert automatic(torch.mm, *rotary) == [(0, 1)]  # too short to be worth a compilation


def test_layers_that_repeat_are_predicted_once(monkeypatch):
    asked = []
    ranked = listed.best_first
    monkeypatch.setattr(listed, "best_first", lambda problem, *given: asked.append(problem) or ranked(problem, *given))
    with foretune.use("inductor", k=2):
        ops, _ = lowered(lambda a, *b: [a @ one for one in b], A, B, tensor(512, 1024), tensor(512, 256))
    assert [problem["n"] for problem in asked] == [1024, 256]
    kept = [[mm_config(choice.annotations["ktc"]) for choice in with_tile(one)] for one in ops]
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize(("k", "kept"), [(512, 2), (500, 2 * GROWTH)])  # 500: rows are unaligned
def test_what_is_left_of_all_that_inductor_lists_is_what_is_ranked_first(k, kept):
    problem = Problem.of("inductor_mm", batch=1, m=256, n=1024, k=k)
    family = find_family("inductor:mm")
    with foretune.use("inductor", k=2):
        (choices,), _ = lowered(torch.mm, tensor(256, k), tensor(k, 1024))
    able = [one for one in family.space(H200) if family.supports(one, problem, H200) is None]
    able = [one for one in able if not one["PERSISTENT_TMA"]]  # which Inductor lists when it is told to
    chosen = foretune.shortlist(family, problem, H200, k=kept, configs=able).configs
    assert [mm_config(choice.annotations["ktc"]) for choice in with_tile(choices)] == list(chosen)


@pytest.mark.parametrize(
    ("precision", "backends", "ranked"),
    [("high", "ATEN,TRITON", ("tf32",)), ("highest", "TRITON", ()), ("highest", "ATEN,TRITON", None)],
)
def test_float32_is_ranked_as_it_is_multiplied_and_left_to_aten_if_exact(precision, backends, ranked, monkeypatch):
    asked = []
    before, best_first = torch.get_float32_matmul_precision(), listed.best_first
    monkeypatch.setattr(
        listed, "best_first", lambda problem, *given: asked.append(problem) or best_first(problem, *given)
    )
    torch.set_float32_matmul_precision(precision)
    try:
        with foretune.use("inductor", k=2):
            (choices,), _ = lowered(
                torch.mm,
                tensor(256, 512, dtype=torch.float32),
                tensor(512, 1024, dtype=torch.float32),
                max_autotune_gemm_backends=backends,
            )
    finally:
        torch.set_float32_matmul_precision(before)
    assert (len(choices) > len(with_tile(choices))) == ("ATEN" in backends)
    if ranked is None:
        assert asked == with_tile(choices) == []
        return
    assert asked == [Problem.of("inductor_mm", dtype="fp32", flags=ranked, batch=1, m=256, n=1024, k=512)]
    assert len(with_tile(choices)) == 2
    assert {multiplies_as_tf32(choice.annotations["ktc"]) for choice in with_tile(choices)} == {bool(ranked)}


def test_an_exact_product_with_a_bias_is_left_to_aten_too():
    operands = tensor(1024, dtype=torch.float32), tensor(256, 512, dtype=torch.float32)
    with foretune.use("inductor", k=2):
        (choices,), _ = lowered(torch.addmm, *operands, tensor(512, 1024, dtype=torch.float32))
    assert choices
    assert not with_tile(choices)


def test_a_list_of_at_most_k_choices_has_only_what_can_run():
    bad, good = ({"PERSISTENT_TMA": one, "GROUP_M": 8, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64} for one in (1, 0))
    configs = [KernelConfig.of(**knobs, num_warps=4, num_stages=3) for knobs in (bad, good)]
    problem = Problem.of("inductor_mm", batch=1, m=1, n=1024, k=1024)
    assert listed.best_first(problem, configs, DeviceSpec.named("h200"), k=8) == (1,)


def test_what_is_collected_multiplies_float32_as_the_problem_says():
    config = KernelConfig.of(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, PERSISTENT_TMA=0, num_warps=4, num_stages=3)
    with use_stub_driver(H200):
        for flags, said in ((("tf32",), "True"), ((), "False")):
            problem = Problem.of("inductor_mm", dtype="fp32", flags=flags, batch=1, m=64, n=512, k=512)
            assert f"ALLOW_TF32 : tl.constexpr = {said}" in product_kernel(problem, config).kernel.jit.src


def test_the_family_lists_what_inductor_lists():
    family = find_family("inductor:mm")
    seen = []
    before = InductorChoices._finalize_template_configs

    def listing(self, *given, **named):
        choices = before(self, *given, **named)
        seen.extend(mm_config(choice) for choice in choices)
        return choices[:1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InductorChoices, "_finalize_template_configs", listing)
        lowered(torch.mm, A, B, **{"triton.enable_persistent_tma_matmul": True})
    listed = {one for one in seen if one is not None}
    assert listed <= set(family.space())
    problem = Problem.of("inductor_mm", batch=1, m=256, n=1024, k=512)
    left_out = [family.supports(one, problem, H200) for one in listed]
    assert {reason.split(" bytes")[0].split()[0] for reason in left_out if reason} == {"needs"}  # shared memory alone
    supported = {one for one in family.space(H200) if family.supports(one, problem, H200) is None}
    assert supported <= listed


def test_a_dynamic_size_is_ranked_as_it_is_hinted_and_guarded_on_no_more():
    _, before = lowered(torch.mm, A, B, dynamic=(0,), max_autotune_gemm_search_space="DEFAULT")
    with foretune.use("inductor", k=2):
        (dynamic,), after = lowered(torch.mm, A, B, dynamic=(0,))
        (static,), _ = lowered(torch.mm, A, B)
    assert [str(guard.expr) for guard in after.guards] == [str(guard.expr) for guard in before.guards]
    configs = [[mm_config(choice.annotations["ktc"]) for choice in with_tile(one)] for one in (dynamic, static)]
    assert configs[0] == configs[1]


def test_grouped_products_are_limited_after_their_code_is_there():
    ends = tensor(8, dtype=torch.int32)
    with foretune.use("inductor", k=2):
        (choices,), _ = lowered(torch._grouped_mm, tensor(1024, 512), tensor(8, 512, 256), ends)
    left = with_tile(choices)
    assert len(left) == 2
    problem = {"groups": 8, "m": 1024, "n": 256, "k": 512, "flags": ("a_ragged",)}
    assert caller_problem(left[0]) == Problem.of("inductor_grouped_mm", **problem)
    assert caller_config(left[0])["BLOCK_M"] >= 64  # 128 rows a group


def test_the_problem_of_a_choice_has_its_layouts():
    weights = tensor(8, 256, 512).transpose(1, 2)
    with foretune.use("inductor", k=2):
        (choices,), _ = lowered(torch._grouped_mm, tensor(1024, 512), weights, tensor(8, dtype=torch.int32))
        assert caller_problem(with_tile(choices)[0]).flags == ("a_ragged", "b_transposed")
        image = tensor(2, 64, 28, 28).to(memory_format=torch.channels_last)
        filters = tensor(128, 64, 3, 3).to(memory_format=torch.channels_last)
        (choices,), _ = lowered(lambda x, w: torch.nn.functional.conv2d(x, w, stride=2, padding=1), image, filters)
    sizes = {"groups": 1, "images": 2, "m": 2 * 14 * 14, "n": 128, "k": 64, "window": 9, "stride": 2}
    found = caller_problem(with_tile(choices)[0])
    assert found in [Problem.of("inductor_convolution", flags=flags, **sizes) for flags in ((), ("channels_last",))]
    # Without a GPU, torch may give the output of such a convolution another layout, which the input follows.
    is_last = with_tile(choices)[0].input_nodes[0].get_stride()[1] == 1
    assert ("channels_last" in found.flags) == is_last


def flex(queries, keys, *, backward=False):
    """Attention of 2 x 8 heads of 64 as Inductor gets it, and its tensors."""
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    mask = _create_empty_block_mask(torch.empty(1, 1, queries, 8), torch.empty(1, 1, keys, 8)).as_tuple()
    places = [place for place, part in enumerate(mask) if isinstance(part, torch.Tensor)]

    def attend(q, k, v, *parts):
        given = list(mask)
        for place, part in zip(places, parts, strict=True):
            given[place] = part
        if backward:
            q, k, v = (one.detach().requires_grad_() for one in (q, k, v))
        out = flex_attention(q, k, v, lambda score, *_: score, tuple(given), 0.125, {}, (), ())[0]
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if backward else out

    heads = [tensor(2, 8, length, 64) for length in (queries, keys, keys)]
    return attend, *heads, *(tensor(*mask[place].shape, dtype=torch.int32) for place in places)


SIZES = {"batch": 16, "groups": 1, "keys": 512, "head_qk": 64, "head_v": 64}


@pytest.mark.parametrize(
    ("queries", "backward", "families"),
    [
        (512, False, ["inductor_flex_attention"]),
        (4, False, ["inductor_flex_decoding"]),
        pytest.param(512, True, ["inductor_flex_attention", "inductor_flex_backward"], marks=pytest.mark.slow),
    ],
)
def test_flex_attention_is_limited_forward_backward_and_in_decode(queries, backward, families):
    with foretune.use("inductor", k=2):
        ops, _ = lowered(*flex(queries, 512, backward=backward))
    assert [len(choices) for choices in ops] == [2] * len(families)
    for choices, family in zip(ops, families, strict=True):
        problem = caller_problem(choices[0])
        assert problem.family == family
        assert {**SIZES, "queries": queries}.items() <= dict(problem.dims).items()
        assert find_family(family).supports(caller_config(choices[0]), problem, H200) is None


def test_undone_everything_is_as_it_was_in_whatever_thread(recwarn):
    before = seams()
    uses = [foretune.use("inductor", k=4), foretune.use("inductor", k=4)]
    assert seams() != before
    uses.pop().undo()
    assert seams() != before
    thread = threading.Thread(target=lambda: foretune.use("inductor", k=4).undo())
    thread.start()
    thread.join()
    uses.pop().undo()
    assert seams() == before


def test_in_mode_off_nothing_is_installed(monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")
    before = seams()
    with foretune.use("inductor", k=4):
        assert seams() == before
    assert seams() == before


def test_the_keys_of_inductors_caches_say_how_many_and_by_what():
    def key():
        return config.save_config_portable()["inductor_choices_class"]

    assert key() is None
    with foretune.use("inductor", k=4):
        four = key()
    with foretune.use("inductor", k=5):
        five, installed = key(), config.inductor_choices_class
    assert four != five
    if isinstance(five, str):  # torch 2.13 asks for a uuid, 2.11 takes the callable
        assert installed().uuid() == five


def test_somebodys_own_handler_stays_in_force_and_counts_in_the_keys():
    class Theirs(InductorChoices):
        def uuid(self):
            return "theirs"

    with config.patch(inductor_choices_class=Theirs):
        with foretune.use("inductor", k=4):
            handler = config.inductor_choices_class()
            assert isinstance(handler, Theirs)
            assert handler.uuid().endswith("-theirs")
        assert config.inductor_choices_class is Theirs


def test_options_that_it_does_not_take_or_that_differ_are_refused():
    with pytest.raises(ForetuneError, match="k must be an integer >= 1 but got 0"):
        foretune.use("inductor", k=0)
    with pytest.raises(ForetuneError, match="k must be 'auto' or an integer >= 1 but got 'few'"):
        foretune.use("inductor", k="few")
    with pytest.raises(ForetuneError, match=r"takes k, bundle, but not top"):
        foretune.use("inductor", top=3)
    with pytest.raises(ForetuneError, match=r"takes no options, but not k"):
        foretune.use("transformers", k=3)
    with foretune.use("inductor", k=3), pytest.raises(ForetuneError, match="already uses Foretune with k=3"):
        foretune.use("inductor", k=4)
    with foretune.use("inductor"), foretune.use("inductor", k=8), foretune.use("inductor", bundle=None):
        pass  # the defaults, named or not


def test_an_inductor_without_the_seams_chooses_as_ever_with_a_warning(monkeypatch):
    monkeypatch.delattr(InductorChoices, "_finalize_template_configs")
    with pytest.warns(foretune.ForetuneWarning, match="it chooses without Foretune"):
        use = foretune.use("inductor")
    assert config.inductor_choices_class is None
    use.undo()


def test_an_inductor_that_calls_the_seam_otherwise_chooses_as_ever_with_a_warning(monkeypatch):
    def with_fewer(handler, template_choices, kernel_inputs):
        return template_choices

    monkeypatch.setattr(InductorChoices, "_finalize_template_configs", with_fewer)
    with foretune.use("inductor", k=1), pytest.warns(foretune.ForetuneWarning, match="no prediction .TypeError"):
        assert InductorChoices()._finalize_template_configs([1, 2], None) == [1, 2]
    assert InductorChoices._finalize_template_configs is with_fewer


def test_trouble_of_ours_lets_all_choices_through_with_a_warning(monkeypatch):
    monkeypatch.setattr(inductor, "device_here", lambda: (_ for _ in ()).throw(ForetuneError("no such device")))
    with foretune.use("inductor", k=2), pytest.warns(foretune.ForetuneWarning, match="Inductor tries all choices"):
        (choices,), _ = lowered(torch.mm, A, B, max_autotune_gemm_search_space="DEFAULT")
    assert len(with_tile(choices)) > 10


def test_choices_of_several_hints_are_limited_each():
    with foretune.use("inductor", k=2):
        (choices,), _ = lowered(torch.mm, A, B, dynamic=(0,), multi_kernel_hints=[64, 4096])
    hints = [choice.annotations["ktc"].params.to_kwargs()["hint_override"] for choice in with_tile(choices)]
    assert {hint: hints.count(hint) for hint in hints} == dict.fromkeys((None, 64, 4096), 2)
    large = [mm_config(one.annotations["ktc"]) for one in with_tile(choices) if one.hint_override == 4096]
    small = [mm_config(one.annotations["ktc"]) for one in with_tile(choices) if one.hint_override == 64]
    assert isinstance(large[0], KernelConfig)
    assert large[0]["BLOCK_M"] * large[0]["BLOCK_N"] > small[0]["BLOCK_M"] * small[0]["BLOCK_N"]


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_the_usual_configs_of_attention_are_those_that_inductor_lists(dim):
    from foretune.kernels.inductor.generated import properties_of

    sizes = {"batch": 8, "groups": 1, "queries": 4, "keys": 4096, "head_qk": dim, "head_v": dim}
    with properties_of(H200), config.patch(max_autotune=True):
        choices = InductorChoices()
        forward = choices.get_flex_attention_fwd_configs(dim, torch.bfloat16, "cuda")
        decode = choices.get_flex_decode_configs(dim, torch.bfloat16, "cuda")
        backward = choices.get_flex_attention_bwd_configs(dim, torch.bfloat16, "cuda")
    for name, more, theirs in (
        ("flex_attention", {}, forward),
        ("flex_decoding", {"splits": 32}, decode),
        ("flex_backward", {}, backward),
    ):
        family = find_family(f"inductor:{name}")
        problem = Problem.of(family.name, flags=("block_mask",), **sizes, **more)
        rows = {"BLOCK_M": 16} if name == "flex_decoding" else {}
        expected = {
            KernelConfig.of(
                **rows,
                **{
                    field.upper(): value
                    for field, value in vars(one).items()
                    if field.startswith("block") and value is not None
                },
                num_warps=one.num_warps,
                num_stages=one.num_stages,
            )
            for one in theirs
        }
        assert set(family.usual(problem, H200)) == expected, name
