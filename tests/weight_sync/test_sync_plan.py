"""For every pair of layouts the planned copies rebuild the engines' fused parameters bit for bit.

Local parameters come from whole tensors through oracles written here (reshape, cat, chunk), not through pieces.
"""

import itertools

import pytest
import torch

from placement.layout import MegatronLayout
from rl_actors.errors import SyncError
from rl_actors.weight_sync import shards
from rl_actors.weight_sync.plan import SyncPlan, make_plan
from rl_actors.weight_sync.shards import Box, Heads, Piece

HEADS = Heads(query=8, key_value=4, size=2)
HIDDEN, FFN, EXPERTS, LAYERS, VOCAB = 6, 16, 4, 2, 13

TRAINERS = [
    MegatronLayout(tp=tp, pp=pp, ep=ep, replicas=replicas)
    for tp, pp, ep, replicas in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2))
]
ENGINES = [(1, 1), (2, 1), (1, 2), (3, 2), (1, 8)]  # (engines, tp); 8 > 4 key-value heads: replicated heads


def hf_model(moe: bool, tied: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        rows, kv_rows = HEADS.query * HEADS.size, HEADS.key_value * HEADS.size
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes |= {f"{attention}.q_proj.weight": (rows, HIDDEN), f"{attention}.o_proj.weight": (HIDDEN, rows)}
        shapes |= {f"{attention}.{part}_proj.weight": (kv_rows, HIDDEN) for part in "kv"}
        for prefix in [f"{mlp}.experts.{e}" for e in range(EXPERTS)] if moe else [mlp]:
            shapes |= {f"{prefix}.{part}_proj.weight": (FFN, HIDDEN) for part in ("gate", "up")}
            shapes[f"{prefix}.down_proj.weight"] = (HIDDEN, FFN)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def qkv_names(layer: int) -> dict[str, str]:
    return {part: f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"}


def megatron_rank(hf, layout: MegatronLayout, rank: int, moe: bool, tied: bool):
    """A rank's parameters and their pieces."""
    at = layout.coords(rank)
    params: dict[str, torch.Tensor] = {}
    pieces: list[Piece] = []

    def add(name, tensor, made):
        params[name] = tensor.contiguous()
        pieces.extend(made)

    def vocabulary(param, name):
        padded = -(-VOCAB // layout.tp) * layout.tp
        full = torch.cat([hf[name], torch.zeros(padded - VOCAB, HIDDEN)])
        local = full.chunk(layout.tp)[at.tp]
        add(param, local, shards.rows(param, name, tuple(local.shape), at.tp, layout.tp, limit=VOCAB))

    def mlp(param, prefix, part, size):
        gate, up = (hf[f"{prefix}.{half}_proj.weight"].chunk(size)[part] for half in ("gate", "up"))
        fc1 = torch.cat([gate, up])
        names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
        add(f"{param}.fc1", fc1, shards.stacked_rows(f"{param}.fc1", names, tuple(fc1.shape), part))
        name = f"{prefix}.down_proj.weight"
        fc2 = hf[name].chunk(size, dim=1)[part]
        add(f"{param}.fc2", fc2, shards.columns(f"{param}.fc2", name, tuple(fc2.shape), part))

    if at.pp == 0:
        vocabulary("embedding", "model.embed_tokens.weight")
    if at.pp == layout.pp - 1 and not (tied and layout.pp == 1):
        vocabulary("output_layer", "model.embed_tokens.weight" if tied else "lm_head.weight")
    per_stage = LAYERS // layout.pp
    for local in range(per_stage):
        layer = at.pp * per_stage + local
        norm = f"model.layers.{layer}.input_layernorm.weight"
        add(f"{local}.norm", hf[norm], shards.whole(f"{local}.norm", norm, (HIDDEN,)))
        q, k, v = (hf[name].view(HEADS.key_value, -1, HIDDEN) for name in qkv_names(layer).values())
        qkv = torch.cat([q, k, v], dim=1).reshape(-1, HIDDEN).chunk(layout.tp)[at.tp]
        made = shards.megatron_qkv(f"{local}.qkv", qkv_names(layer), HEADS, HIDDEN, at.tp, layout.tp)
        add(f"{local}.qkv", qkv, made)
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        proj = hf[name].chunk(layout.tp, dim=1)[at.tp]
        add(f"{local}.proj", proj, shards.columns(f"{local}.proj", name, tuple(proj.shape), at.tp))
        if not moe:
            mlp(f"{local}.mlp", f"model.layers.{layer}.mlp", at.tp, layout.tp)
            continue
        per_rank = EXPERTS // layout.ep
        for index in range(per_rank):
            prefix = f"model.layers.{layer}.mlp.experts.{at.ep * per_rank + index}"
            mlp(f"{local}.expert{index}", prefix, at.etp, layout.etp)
    return params, pieces


def vllm_worker(hf, tp: int, rank: int, moe: bool, tied: bool):
    """A worker's parameters as vLLM would load them, and their pieces."""
    params: dict[str, torch.Tensor] = {}
    pieces: list[Piece] = []

    def add(name, tensor, made):
        params[name] = tensor.contiguous()
        pieces.extend(made)

    def gate_up(prefix):
        return torch.cat([hf[f"{prefix}.{half}_proj.weight"].chunk(tp)[rank] for half in ("gate", "up")])

    for param, name in (("embed", "model.embed_tokens.weight"), ("head", "lm_head.weight")):
        if name in hf:
            padded = torch.cat([hf[name], torch.zeros(16 - VOCAB, HIDDEN)])  # vLLM pads the vocabulary too
            local = padded.chunk(tp)[rank]
            add(param, local, shards.rows(param, name, tuple(local.shape), rank, tp, limit=VOCAB))
    for layer in range(LAYERS):
        norm = f"model.layers.{layer}.input_layernorm.weight"
        add(f"{layer}.norm", hf[norm], shards.whole(f"{layer}.norm", norm, (HIDDEN,)))
        q, k, v = (hf[name].view(-1, HEADS.size, HIDDEN) for name in qkv_names(layer).values())
        repeated = [heads.repeat_interleave(max(1, tp // HEADS.key_value), dim=0) for heads in (k, v)]
        qkv = torch.cat([heads.chunk(tp)[rank] for heads in (q, *repeated)]).reshape(-1, HIDDEN)
        add(f"{layer}.qkv", qkv, shards.vllm_qkv(f"{layer}.qkv", qkv_names(layer), HEADS, HIDDEN, rank, tp))
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        o_proj = hf[name].chunk(tp, dim=1)[rank]
        add(f"{layer}.o", o_proj, shards.columns(f"{layer}.o", name, tuple(o_proj.shape), rank))
        mlp = f"model.layers.{layer}.mlp"
        prefixes = [f"{mlp}.experts.{e}" for e in range(EXPERTS)] if moe else [mlp]
        w13 = torch.stack([gate_up(prefix) for prefix in prefixes])
        w2 = torch.stack([hf[f"{prefix}.down_proj.weight"].chunk(tp, dim=1)[rank] for prefix in prefixes])
        made13, made2 = [], []
        for index, prefix in enumerate(prefixes):
            names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
            one13 = shards.stacked_rows("", names, tuple(w13.shape[1:]), rank)
            one2 = shards.columns("", f"{prefix}.down_proj.weight", tuple(w2.shape[1:]), rank)
            made13 += shards.expert(one13, f"{layer}.w13", index)
            made2 += shards.expert(one2, f"{layer}.w2", index)
        add(f"{layer}.w13", w13, made13)
        add(f"{layer}.w2", w2, made2)
    return params, pieces


def window(tensor: torch.Tensor, local) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in local)]


def run(plan: SyncPlan, senders: list[dict[str, torch.Tensor]], receivers: list[dict[str, torch.Tensor]]) -> None:
    """Carry the messages over a dictionary, exactly as the plan says; writing an element twice fails."""
    wires = {}
    for rank, rounds in enumerate(plan.sends):
        for one in rounds:
            for message in one.messages:
                assert {part.param for part in message.parts} <= set(one.params)
                flat = torch.cat([window(senders[rank][part.param], part.local).flatten() for part in message.parts])
                assert flat.numel() == message.numel
                for receiver, tag in zip(message.receivers, message.tags, strict=True):
                    wires[rank, receiver, tag] = flat
    for receiver, messages in enumerate(plan.receives):
        for message in messages:
            flat = wires.pop((message.sender, receiver, message.tag))
            for part in message.parts:
                target = window(receivers[receiver][part.param], part.local)
                assert target.isnan().all(), "written twice"
                target.copy_(flat[: target.numel()].view(part.shape))
                flat = flat[target.numel() :]
            assert not len(flat)
    assert not wires, "sent to nobody"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "moe"),
    [(layout, moe) for layout in TRAINERS for moe in (False, True) if moe or layout.ep == 1],
    ids=lambda value: str(value) if isinstance(value, MegatronLayout) else ("moe" if value else "dense"),
)
def test_engines_get_every_tensor_bit_for_bit(layout, moe, tied):
    hf = hf_model(moe, tied)
    trainer = [megatron_rank(hf, layout, rank, moe, tied) for rank in range(layout.world_size)]
    for engines, tp in ENGINES:
        wanted = [vllm_worker(hf, tp, worker % tp, moe, tied) for worker in range(engines * tp)]
        owners = [worker // tp for worker in range(engines * tp)]
        plan = make_plan([p for _, p in trainer], [p for _, p in wanted], owners, bucket_numel=200)
        assert plan.tensors == len(hf)
        got = [{name: torch.full_like(tensor, torch.nan) for name, tensor in params.items()} for params, _ in wanted]
        run(plan, [params for params, _ in trainer], got)
        for (expected, _), received in zip(wanted, got, strict=True):
            for name, tensor in expected.items():
                # Padding of the vocabulary belongs to no Hugging Face tensor and is not written.
                assert torch.equal(received[name].nan_to_num(0.0), tensor), f"{layout} -> {engines}x{tp}: {name}"


def test_replicas_share_the_sending():
    hf = hf_model(moe=True, tied=True)
    layout = MegatronLayout(ep=2, replicas=4)
    pieces = [megatron_rank(hf, layout, rank, True, True)[1] for rank in range(layout.world_size)]
    plan = make_plan(pieces, [vllm_worker(hf, 1, 0, True, True)[1]], [0], bucket_numel=10**6)
    sent = [sum(message.numel for one in rounds for message in one.messages) for rounds in plan.sends]
    assert sum(sent) == sum(tensor.numel() for tensor in hf.values())
    assert max(sent) < 2.2 * min(sent), "replicas hold the same, so each sends about as much as the others"


PLACES = {
    "colocated": (["a/0", "a/1", "b/0", "b/1"], ["a/0", "a/1", "b/0", "b/1"]),
    "apart": (["a/0", "a/1", "b/0", "b/1"], ["a/2", "a/3", "b/2", "b/3"]),
    "another node": (["a/0", "a/1", "a/2", "a/3"], ["b/0", "b/1", "b/2", "b/3"]),
}
FOUR_RANKS = [MegatronLayout(replicas=4), MegatronLayout(ep=2, replicas=4), MegatronLayout(tp=2, replicas=2)]


@pytest.mark.parametrize("layout", FOUR_RANKS, ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_replicas_send_within_their_node(name, layout):
    hf = hf_model(moe=True, tied=True)
    places = PLACES[name]
    trainer = [megatron_rank(hf, layout, rank, True, True) for rank in range(4)]
    params, pieces = vllm_worker(hf, 1, 0, True, True)
    plan = make_plan([p for _, p in trainer], [pieces] * 4, range(4), 200, places)
    got = [{name: torch.full_like(tensor, torch.nan) for name, tensor in params.items()} for _ in range(4)]
    run(plan, [own for own, _ in trainer], got)
    assert all(torch.equal(one[key].nan_to_num(0.0), params[key]) for one in got for key in params)
    crossing, total = 0, 0
    for rank, rounds in enumerate(plan.sends):
        for message in (message for one in rounds for message in one.messages):
            for receiver in message.receivers:
                total += message.numel
                crossing += message.numel * (places[0][rank][0] != places[1][receiver][0])
    assert crossing == (total if name == "another node" else 0), "each node holds all there is"
    for rounds in plan.sends:
        for one in rounds:
            sent = {part.param for message in one.messages for part in message.parts}
            assert set(one.params) == sent, "nothing is merged for nobody"
    if layout == FOUR_RANKS[0]:
        merged = [sum(len(one.params) for one in rounds) for rounds in plan.sends]
        assert sum(merged) == len(trainer[0][0]) * (1 if name == "another node" else 2), "once for each node"


def test_a_rank_merges_nothing_that_workers_near_it_do_not_need():
    """Four ranks on two nodes hold two halves each; the one engine of the second node is tensor parallel over both."""
    hf = hf_model(moe=False, tied=True)
    layout = MegatronLayout(tp=2, replicas=2)
    trainer = [megatron_rank(hf, layout, rank, False, True) for rank in range(4)]
    wanted = [vllm_worker(hf, 2, rank, False, True) for rank in range(2)]
    places = (["a/0", "a/1", "b/0", "b/1"], ["b/0", "b/1"])
    plan = make_plan([p for _, p in trainer], [p for _, p in wanted], [0, 0], 200, places)
    assert plan.sends[0] == plan.sends[1] == ()
    got = [{name: torch.full_like(tensor, torch.nan) for name, tensor in params.items()} for params, _ in wanted]
    run(plan, [own for own, _ in trainer], got)
    assert all(
        torch.equal(one[k].nan_to_num(0.0), own[k]) for one, (own, _) in zip(got, wanted, strict=True) for k in own
    )


def test_engines_that_want_the_same_share_one_packed_message():
    hf = hf_model(moe=False, tied=True)
    pieces = [megatron_rank(hf, MegatronLayout(), 0, False, True)[1]]
    workers = [vllm_worker(hf, 1, 0, False, True)[1]] * 3
    plan = make_plan(pieces, workers, [0, 1, 2], bucket_numel=10**6)
    assert [message.receivers for one in plan.sends[0] for message in one.messages] == [(0, 1, 2)]


def test_rounds_keep_to_the_bucket():
    hf = hf_model(moe=True, tied=True)
    params, pieces = megatron_rank(hf, MegatronLayout(), 0, True, True)
    plan = make_plan([pieces], [vllm_worker(hf, 1, 0, True, True)[1]], [0], bucket_numel=400)
    assert [name for one in plan.sends[0] for name in one.params] == list(params)
    for one in plan.sends[0]:
        assert len(one.params) == 1 or sum(params[name].numel() for name in one.params) <= 400


def test_stacked_experts_travel_as_one_rectangle():
    """Experts of one parameter on both sides, at the same places of the stack or not."""
    full = torch.randn(4, 6, 3)

    def pieces(first: int, count: int, columns: tuple[int, int]) -> list[Piece]:
        width = columns[1] - columns[0]
        boxes = [Box(f"expert {first + index}", ((0, 6), columns)) for index in range(count)]
        return [Piece(box, "stack", ((i, i + 1), (0, 6), (0, width))) for i, box in enumerate(boxes)]

    trainer = [pieces(0, 2, (0, 3)), pieces(2, 2, (0, 3))]
    workers = [pieces(0, 4, (0, 2)), pieces(0, 4, (2, 3))]
    plan = make_plan(trainer, workers, [0, 0], bucket_numel=100)
    assert [len(message.parts) for one in plan.sends for r in one for message in r.messages] == [1] * 4
    got = [{"stack": torch.full((4, 6, width), torch.nan)} for width in (2, 1)]
    run(plan, [{"stack": full[:2]}, {"stack": full[2:]}], got)
    assert torch.equal(torch.cat([one["stack"] for one in got], dim=-1), full)


def test_gate_and_up_of_several_experts_keep_their_order():
    """Rows that follow each other are joined only within one expert."""
    boxes = [(f"{half} {expert}", expert, half) for expert in range(2) for half in range(2)]
    source = [Piece(Box(n, ((0, 3), (0, 2))), "s", ((e, e + 1), (3 * h, 3 * h + 3), (0, 2))) for n, e, h in boxes]
    halves = [Piece(Box(n, ((0, 3), (0, 2))), f"t{h}", ((e, e + 1), (0, 3), (0, 2))) for n, e, h in boxes]
    halves.sort(key=lambda one: one.param)
    full = torch.randn(2, 6, 2)
    for target, shapes in ((source, {"s": (2, 6, 2)}), (halves, {"t0": (2, 3, 2), "t1": (2, 3, 2)})):
        plan = make_plan([source], [target], [0], bucket_numel=100)
        got = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        run(plan, [{"s": full}], [got])
        assert torch.equal(torch.cat(list(got.values()), dim=1), full)


def test_only_tensors_of_the_trainer_are_planned():
    hf = hf_model(moe=False, tied=True)
    touched = [piece for piece in megatron_rank(hf, MegatronLayout(), 0, False, True)[1] if ".qkv" in piece.param]
    plan = make_plan([touched], [vllm_worker(hf, 1, 0, False, True)[1]], [0], bucket_numel=10**6)
    assert plan.tensors == 3 * LAYERS
    assert {part.param for message in plan.receives[0] for part in message.parts} == {"0.qkv", "1.qkv"}


def piece(name: str, rows: tuple[int, int], param: str = "p") -> Piece:
    return Piece(Box(name, (rows, (0, 2))), param, ((0, rows[1] - rows[0]), (0, 2)))


@pytest.mark.parametrize(
    ("trainer", "worker", "complaint"),
    [
        ([[piece("w", (0, 4)), piece("x", (0, 4), "q")]], [piece("x", (0, 4))], "w: the trainer has 8 elements"),
        ([[piece("w", (0, 3))]], [piece("w", (0, 4))], "w: the trainer has 6 elements of it and engine 0 8"),
        (
            [[piece("w", (0, 3))], [piece("w", (2, 3))]],
            [piece("w", (0, 4))],
            "w: trainer ranks 0 and 1 hold overlapping",
        ),
        ([[piece("w", (0, 2))], [piece("w", (4, 6))]], [piece("w", (0, 4))], "w: worker 0 needs"),
    ],
)
def test_a_tensor_that_is_not_covered_exactly_once_is_named(trainer, worker, complaint):
    with pytest.raises(SyncError, match=complaint):
        make_plan(trainer, [worker], [0], bucket_numel=100)
