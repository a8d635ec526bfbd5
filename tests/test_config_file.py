"""A recipe means what a person reads in it, and a wrong one is answered with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_actors.config_file import dump_config, load_config
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig

MINIMAL = "run_dir: r\nmodel: {path: m}\ndata: {train: d}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_words_and_numbers_are_read_as_written(recipe: Path) -> None:
    config = load_config(
        recipe, ["tracking.wandb=off", "trainer.optimizer.lr=1e-4", "data.chat_template=false", "seed=7"]
    )
    assert (config.tracking.wandb, config.trainer.optimizer.lr, config.seed) == ("off", 1e-4, 7)
    assert config.data.chat_template is False


def test_overrides_reach_sections_the_recipe_does_not_name(recipe: Path) -> None:
    assert load_config(recipe, ["trainer.optimizer.schedule=cosine"]).trainer.optimizer.schedule == "cosine"


def test_a_dumped_configuration_reads_back_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["tracking.wandb=off", "rollout.stop=[END]", "lora.targets=[linear_qkv]"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: [", "not valid YAML"),
        ("- a list", "holds a list"),
        ("run_dir: r\ndata: {train: d}\n", "needs a value for 'model'"),
        (MINIMAL + "lorra: {rank: 4}\n", "unknown key 'lorra' .* did you mean 'lora'"),
        (MINIMAL + "trainer: {lr: 1}\n", "unknown key 'trainer.lr' .* did you mean 'trainer.optimizer.lr'"),
        (MINIMAL + "rollout: {temperature: -1}\n", "rollout.temperature = -1 cannot be used"),
        ("a: 2020-13-45", "not valid YAML: month must be"),
        ("a: !!int abc", "not valid YAML"),
        ("a: !!timestamp abc", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        (MINIMAL + "seed: -0x" + "f" * 5000, "too large to show"),
        ("[" * 3000, "nested too deeply"),
        (MINIMAL + "seed: 1\nseed: 2\n", "the key 'seed' stands twice"),
        (MINIMAL + "trainer:\n  tp: 1\n  'tp': 2\n", "the key 'tp' stands twice"),
        ("false", "holds a bool"),
        ("0", "holds a int"),
    ],
)
def test_a_wrong_recipe_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(path)
    assert "\n" not in str(caught.value) and "recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.temperature=.inf",
        "rollout.kv_cache_gib=.inf",
        "trainer.optimizer.lr=.nan",
        "placement.timeout_s=.inf",
        "trainer.optimizer.adam_beta1=1",
        "trainer.optimizer.adam_beta2=1.0",
        "rollout.top_k=0",
        "rollout.top_k=-2",
        "rollout.stop=['']",
        "lora.targets=[]",
        "run_dir=''",
        "run_dir=.",
        "run_dir=./",
        "run_dir=/",
        "run_dir=..",
        "trainer.tp=true",
        "seed=false",
        "rollout.kv_cache_gib=true",
        "rollout.kv_cache_gib=1e300",
        "rollout.max_num_seqs=100000",
        "sync.bucket_mib=2000000",
        "reward.workers=100000",
        "trainer.threads_per_rank=100000",
        "timeouts.start_s=1e300",
        "reward.timeout_s=1e12",
        f"pipeline.steps={10**30}",
        f"seed={2**31}",
        f"rollout.top_k={-(2**40)}",
        f"trainer.optimizer.lr={10**400}",
        "checkpoint.storage='  '",
        "checkpoint.storage=''",
        "checkpoint.storage=s3:/bucket/x",
        "checkpoint.storage=s3:bucket",
        "checkpoint.storage=s3://",
        "checkpoint.storage=s3:///x",
        "checkpoint.storage=gs://?scheme=http",
    ],
)
def test_a_value_that_cannot_work_is_named(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.") + ".* cannot be used"):
        load_config(recipe, [override])


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ("{targets: ['*[']}", r"'\*\[' is no module name"),
        ("{exclude: ['']}", r"'' is no module name"),
        ("{targets: [q_proj]}", r"use linear_qkv, or linear_q with lora.variant=canonical_lora"),
        ("{targets: ['*.layers.0.*.up_proj']}", r"use linear_fc1, or linear_fc1_up with"),
        ("{targets: [o_proj]}", r"o_proj is Hugging Face's name: Megatron's is linear_proj"),
        ("{targets: [linear_k]}", r"linear_k is a part of Megatron's linear_qkv"),
        ("{variant: canonical_lora, targets: [q_proj]}", r"Megatron's is linear_q$"),
        ("{variant: canonical_lora, targets: [linear_qkv]}", r"use linear_q, linear_k, linear_v, or lora.variant=lora"),
        ("{variant: canonical_lora, exclude: [linear_fc1]}", r"lora\.exclude.*use linear_fc1_gate, linear_fc1_up"),
        ("{variant: dora, targets: [linear_v]}", r"linear_v is a part of"),
        ("{variant: dora, dropout: 0.1}", r"lora\.dropout.*dora has none"),
        ("{variant: dora, share_expert_adapters: true}", r"dora has none: leave it off"),
        ("{variant: canonical_lora, share_expert_adapters: true}", r"every expert its own adapters: leave it off"),
        ("{scaling: other}", r"lora\.scaling"),
    ],
)
def test_what_a_lora_variant_cannot_do_is_named(recipe: Path, lora: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(recipe, [f"lora={lora}"])


def test_canonical_lora_targets_the_parts() -> None:
    parts = ("linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2")
    config = LoraConfig(variant="canonical_lora")
    assert config.targets == parts
    assert LoraConfig(**config.model_dump()) == config


@pytest.mark.parametrize("value", ["2020-13-45", "!!int abc", "[" * 3000, "9" * 5000, "{a: 1, a: 2}"])
def test_an_override_that_is_no_yaml_is_refused(recipe: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"override 'seed=.*the value is not valid YAML"):
        load_config(recipe, [f"seed={value}"])


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    text = "run_dir: r\nmodel: {path: m}\ndata: &d {train: d}\n"
    (tmp_path / "a.yaml").write_text(text.replace("data: &d", "data: {<<: {train: x, shuffle: false}, train: d} #"))
    assert load_config(tmp_path / "a.yaml").data.shuffle is False


def test_a_path_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used: File name too long"):
        load_config("x" * 5000)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml is not a file"):
        load_config(tmp_path / "no.yaml")
