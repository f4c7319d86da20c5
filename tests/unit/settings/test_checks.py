"""Bad configs of runs and plans: each gets its sentence, all problems of one config come together."""

from dataclasses import fields

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings import checks
from llama_ssp.settings.checks import check_plan
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import PlanConfig
from llama_ssp.settings.tasks import task_specs
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.own_conf import OwnConf

BAD = {
    "speculation.num_draft_tokens=some": "speculation.num_draft_tokens=some must be at least 1",
    "sampling.temperature=-1": "sampling.temperature=-1.0 must be 0 (greedy) or at least 1e-06, for example 0.8",
    "sampling.temperature=1e-7": "sampling.temperature=1e-07 must be 0 (greedy) or at least 1e-06",
    "sampling.temperature=inf": "sampling.temperature=inf must be",
    "stop_strings=\"['']\"": 'empty string, which matches everywhere: give texts such as stop_strings=["\\n\\n"]',
    "sampling.min_p=2": "sampling.min_p=2.0 must be above 0 and at most 1",
    "sampling.top_p=0": "sampling.top_p=0.0 must be above 0 and at most 1",
    "sampling.min_new_tokens=0": "sampling.min_new_tokens=0 must be at least 1, or null to switch it off",
    "sampling.min_new_tokens=65": "sampling.min_new_tokens=65 is more than max_new_tokens=64: give fewer",
    "sampling.logit_bias={5:inf}": "must be numbers from -10000 to 10000, such as {198: -100}",
    "sampling.logit_bias={5:nan}": "must be numbers from -10000 to 10000, such as {198: -100}",
    "sampling.logit_bias={5:-1e40}": "must be numbers from -10000 to 10000, such as {198: -100}",
    "sampling.logit_bias=5:1": "5:1: write it in quotes, as in 'sampling.logit_bias={198: -2.5}'",
    "sampling.logit_bias=[5,1]": "[5,1]: write it in quotes, as in 'sampling.logit_bias={198: -2.5}'",
    "sampling.logit_bias={a:1}": "{a:1}: write it in quotes, as in 'sampling.logit_bias={198: -2.5}'",
    "sampling.bad_words=[\"' '\"]": "sampling.bad_words has an empty text",
    "sampling.top_k=0": "sampling.top_k=0 must be at least 1",
    "max_new_tokens=0": "max_new_tokens=0 must be at least 1",
    "batch_size=0": "batch_size=0 must be at least 1",
    "num_samples=2147483648": "num_samples=2147483648 must be at least 1 and at most 1000000 completions",
    "seed=9223372036854775808": "must be between 0 and 2^63 - 1",
    "timeouts.decode_s=1e30": "timeouts.decode_s=1e+30 must be a positive number of seconds, at most 2000000",
    "prompts=nowhere.txt": "prompts=nowhere.txt does not exist: give a file, .txt with a prompt per line",
    "prompts=/": "prompts=/ is a folder: give a file, .txt",
    "run_dir=null": "run_dir=null must be a folder",
    "run_dir=": "run_dir= must be a folder: every run keeps its records in one; left out, it is outputs/ID",
    "prompt=a prompts=/dev/null": "prompt= and prompts= exclude each other",
    "draft=none": "task=compare needs a draft, and model=tiny runs without one here: give draft=tiny-draft",
    "model=llama3_1B": "give draft=OWNER/NAME (of the hub), or draft=local draft.model.path=DIR, or use",
    "sampling=greedy sampling.temperature=0.5": "sampling=greedy is temperature 0, and sampling.temperature=0.5 was g",
    "verification=greedy": "use sampling=greedy, verification=speculative, verification=block or verification=coupled",
    "draft=7B": "model=tiny has 4096 tokens, draft=7B 32000; drafts that fit: tiny-draft",
    "model=gpt_neox_20B draft=gpt_neo_1.3B": "that fit: none in the catalogue",
    "task=generate model=tiny-eagle draft=none": "model=tiny-eagle is a draft head: give its target as the model",
    "model=tiny draft=eagle3_llama3_8B": "draft=eagle3_llama3_8B is the head of a target of width 4096",
    "model=qwen3_32B draft=eagle3_qwen3_14B": "is the head of qwen3_14B, which has 40 layers, and model=qwen3_32B",
    "speculation.tree=2x0": "speculation.tree=2x0: '2x0' is not the shape of a tree: give the number of children",
    "speculation.tree=16x16x2": "has 784 drafted tokens; 256 is the most: give fewer children, or fewer levels",
    "speculation.tree=dynamic draft=ngram": "needs a draft model or head, whose probabilities shape it, and draft=ng",
    "speculation.tree=2 verification=coupled": "needs verification=speculative or verification=block, or sampling=gre",
    "speculation.tree=2 sampling.presence_penalty=1": "speculation.tree=2 needs sampling without penalties",
    "speculation.tree=2 placement=replicated": "needs one draft for all rows: use placement=one_rank",
    "speculation.tree=2x2 speculation.num_draft_tokens=3": "num_draft_tokens has no effect with speculation.tree",
    "placement.target.stages=0": "placement.target.stages=0 must be at least 1, for example 2",
    "placement.target.groups=2": "groups=2 needs stages that groups of rows pass: give placement.target.st",
    "placement.target.stages=2 placement.target.groups=0": "groups=0 must be at least 1, for example 2",
    "placement.target.stages=2 placement.target.layers=[6]": "must have a number of layers, at least 1, for each of pl",
    "placement.target.stages=2 placement.target.layers=[3,4]": "add up to 7 layers, and model=tiny has 10: give all",
    "placement.target.stages=2 model=tiny draft=self draft.layers=2": "draft=self drafts with layers of one stage, and",
    "speculation.forced_lengths=[1,5]": "speculation.forced_lengths=[1, 5] needs numbers from 0 to K, here 4",
    "speculation.forced_lengths=[1] speculation.num_draft_tokens=0": "num_draft_tokens=0 must be at least 1",
    "speculation.forced_lengths=[1] speculation.num_draft_tokens=some": "speculation.num_draft_tokens=some must be at",
    "speculation.forced_lengths=[-1]": "needs numbers from 0 to K, here 4",
    "speculation.forced_lengths=[1] speculation.tree=2x2": "needs chains: leave speculation.tree out",
    "speculation.forced_lengths=[1] speculation.num_draft_tokens=auto": "needs equal rounds: leave",
    "task=generate speculation.forced_lengths=[1]": "needs a task that shows times, and the texts of task=generate mus",
    "task=generate speculation.forced_lengths=[2]": "of task=generate must be the target's: use task=compare",
    "speculation.forced_lengths=[1] speculation.acceptance=0.5": "speculation.acceptance has no effect with speculati",
    "draft.greedy=true sampling=greedy": "draft.greedy has no effect at temperature 0",
    "task=generate quiet=true task.format=jsonl": "task.format has no effect with quiet=true, which prints tables",
    "model=local draft=tiny": "model=local needs model.path=DIR",
    "draft=local": "draft=local needs draft.model.path=DIR",
    "device=cpu cuda_graphs=true": "cuda_graphs has no effect with device=cpu",
    "device=cpu own_sums=true": "own_sums has no effect with device=cpu",
    "verification.rule=blocks": "verification.rule 'blocks': there are block, coupled, greedy, speculative; did you",
    "model.quantization=int9": "quantization 'int9': there are ",
    "draft.model.quantization=nf5": "unknown draft.model.quantization 'nf5': ",
    "max_new_tokens=2048": "max_new_tokens=2048 leaves no room for a prompt: the context of the model is 2048 tokens",
    "chat=true": "model=tiny has none: use phi_4, qwen3_0.6B, qwen3_14B",
    "placement.target.ranks=[0]": "rank 1 would hold nothing: the target is on rank 0, the draft on rank 0; name",
    "task=generate draft=none placement.target.tp_size=1": "rank 1 would hold nothing: the target is on rank 0; name",
    "placement.target.ranks=[0,0]": "placement.target.ranks=[0, 0] must name different ranks between 0 and 1",
    "placement.target.ranks=[0,2]": "placement.target.ranks=[0, 2] must name different ranks between 0 and 1",
    "placement.target.tp_size=4": "placement.target.tp_size=4 must be between 1 and the number of ranks, here 2",
    "placement.target.ranks=[0,1] placement.target.tp_size=1": "contradict each other: give one",
    "placement.draft.ranks=[2]": "placement.draft.ranks=[2] must name different ranks between 0 and 1",
    "placement.draft.ranks=[0,1]": "placement.draft.ranks=[0, 1] must be one rank",
    "placement.draft.ranks=[]": "placement.draft.ranks=[] must name different ranks",
    "placement.draft.tp_size=2": "placement.draft.tp_size=2 must be 1 on one rank",
    "placement=replicated placement.draft.tp_size=2": "tp_size=2 has no effect on a replicated draft",
    "placement=replicated placement.target.ranks=[0] placement.draft.ranks=[0,1]": "[0, 1] are not all among rank 0",
    "placement=own_gpu placement.target.ranks=[0,1] placement.draft.ranks=[1]": "on ranks 0 1, the draft on rank 1",
    "placement=own_gpu placement.target.ranks=[0,1]": "the draft on ranks (none)",
    "placement=own_gpu placement.draft.tp_size=2": "the target is on ranks (none), the draft on ranks 0 1",
    "placement.num_replicas=3": "placement.num_replicas=3 must share 2 ranks out evenly: use 1 or 2",
    "placement.num_replicas=2 placement.draft.ranks=[1]": "must name different ranks between 0 and 0",
    "placement=own_gpu placement.num_replicas=2": "a GPU in addition to the target's, and each replica has one",
    "placement=auto placement.target.tp_size=1": "placement.target.tp_size has no effect with placement=auto",
    "task=generate draft=none speculation.num_draft_tokens=2": "num_draft_tokens has no effect without a draft",
    "task=generate draft=none verification=speculative": "verification has no effect without a draft",
    "task=generate draft=none placement.draft.ranks=[0]": "placement.draft.ranks has no effect without a draft",
    "task=generate draft=none draft.model.dtype=bf16": "draft.model.dtype has no effect without a draft",
    "sampling=greedy sampling.top_k=5": "sampling.top_k has no effect at temperature 0",
    "sampling=greedy sampling.min_p=0.5": "sampling.min_p has no effect at temperature 0",
    "sampling=greedy sampling.top_p=0.5": "sampling.top_p has no effect at temperature 0",
    "ignore_eos=true sampling.min_new_tokens=3": "sampling.min_new_tokens has no effect with ignore_eos=true",
    "sampling=greedy num_samples=2": "num_samples has no effect at temperature 0",
    "prompt=a task.default_prompts=[b]": "task.default_prompts has no effect with prompt= or prompts=",
    "model.path=DIR model.revision=main": "model.revision has no effect with model.path",
    "model.revision=main": "model.revision has no effect on an entry that comes with the package: use model=OWNER/",
    "draft.model.hub_id=a/b": "draft.model.hub_id has no effect on an entry that comes with the package: use ",
    "draft.model.path=DIR draft.model.hub_id=a": "draft.model.hub_id has no effect with draft.model.path",
    "speculation.overlap=true": "on ranks of its own, and placement.draft.kind=one_rank was given: use placement=",
    "speculation.overlap=true placement=auto": "needs a draft on ranks of its own, and placement=auto was given",
    "speculation.overlap=true draft=ngram": "needs a draft model, and draft=ngram has none: give one with draft=NAME",
    "speculation.overlap=true placement=own_gpu speculation.num_draft_tokens=auto": "needs one K for all rounds",
    "speculation.overlap=true task=generate draft=none": "overlap has no effect without a draft: give one with",
}
"""Words, and a part of the sentence that refuses them on two ranks."""
GOOD = [
    "sampling.top_p=1 sampling.top_k=1 max_new_tokens=2047",
    "model=30B draft=7B sampling=greedy verification=greedy seed=3",
    "model=llama3_1B task=generate prompts=README.md",
    "model=llama3_1B task=generate",
    "model=local model.path=DIR draft=local draft.model.path=DIR2 chat=true",
    "model=30B draft=7B sampling=nucleus sampling.temperature=0",
    "model.path=DIR chat=true",
    "model=smollm2_1.7B chat=true",
    "model=7B draft=none task=generate num_samples=3 model.hub_id=a/b model.revision=main",
    "placement.target.ranks=[0,1] placement.target.tp_size=2 placement.draft.ranks=[1]",
    "placement.target.ranks=[0] placement.draft.ranks=[1]",
    *(f"placement={name}" for name in ("sharded", "own_gpu", "replicas", "auto")),
    "placement=replicated placement.draft.ranks=[1]",
    "speculation.tree=3x1x1 draft=ngram placement=replicated",
    "model=qwen3_32B draft=eagle3_qwen3_32B",
    *(f"speculation.overlap=true placement=own_gpu device={device}" for device in ("cpu", "cuda")),
]


@pytest.mark.seconds
def test_an_unknown_kind_of_placement_is_one_of_all_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        checks.check(*compose_run("placement.target.kind=foo", "sampling.temperature=-1"), world_size=2)
    assert str(caught.value).startswith("2 problems")
    assert "unknown placement.target.kind 'foo'" in str(caught.value)


@pytest.mark.seconds
@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)


@pytest.mark.parametrize("words", GOOD)
def test_a_sound_config_passes(words: str) -> None:
    checks.check(*compose_run(*words.split()), world_size=2)


def test_more_ranks_than_heads_are_refused() -> None:
    checks.check(*compose_run(), world_size=8)
    with pytest.raises(ConfigError, match="9 ranks are more than the 8 attention heads of model=tiny: start at most 8"):
        checks.check(*compose_run(), world_size=9)
    checks.check(*compose_run("placement.draft.kind=sharded", "placement.draft.tp_size=4"), world_size=8)
    with pytest.raises(ConfigError, match=r"5 ranks are more than the 4 .* draft=tiny-draft: at most placement.dr"):
        checks.check(*compose_run("placement.draft.kind=sharded", "placement.draft.tp_size=5"), world_size=8)
    checks.check(*compose_run("placement.draft.kind=replicated"), world_size=8)


def test_heads_may_be_padded_to_different_widths() -> None:
    config, explicit = compose_run()
    assert config.draft.model
    assert config.draft.model.shape
    config.draft.model.shape.vocab_size = 4128
    checks.check(config, explicit, world_size=1)
    config.draft.model.shape.vocab_size = 4160
    with pytest.raises(ConfigError, match="draft=tiny-draft 4160"):
        checks.check(config, explicit, world_size=1)


def test_what_the_record_of_a_task_names_are_its_settings() -> None:
    for task in task_specs().values():
        named = {*(name for name, _, _ in task.ranges), *task.paths, *task.changeable, task.variant} - {None}
        assert named <= {setting.name for setting in fields(task.config)}, task.name


ALL = {
    "speculation.num_draft_tokens=0 sampling.temperature=-1 placement.draft.ranks=[5] draft=7B": [
        "num_draft_tokens=0",
        "temperature=-1.0",
        "placement.draft.ranks=[5]",
        "draft=7B",
    ],
    "speculation.overlap=true placement=own_gpu speculation.num_draft_tokens=auto draft.fallback=ngram": [
        "needs one K for all rounds",
        "drafts with the model alone: leave draft.fallback=ngram out",
    ],
}


@pytest.mark.parametrize(("words", "sentences"), ALL.items())
def test_all_problems_come_in_one_error(words: str, sentences: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{len(sentences)} problems in the configuration:\n  1. ") as caught:
        checks.check(*compose_run(*words.split()), world_size=2)
    assert all(sentence in str(caught.value) for sentence in sentences)


REFUSED = {
    "placement.target.tp_size=9": "tp_size=9 must be between 1 and the number of ranks, here 8",
    "placement=own_gpu hardware.num_gpus=1": "own_gpu needs a GPU in addition to the target's",
    "prompt_tokens=3936": "make 4000, and the context of model=30B has 2048 tokens",
    "draft=llama3_1B": "model=30B has 32000 tokens, draft=llama3_1B 128256; drafts that fit: tiny",
    "model=qwen2.5_7B draft=llama3_1B": "drafts that fit: qwen2.5_0.5B",
}


def check(words: str) -> None:
    (composed,) = compose(words.split(), root="plan")
    config = to_run_config(composed)
    assert isinstance(config, PlanConfig)
    check_plan(config)


@pytest.mark.parametrize(("words", "sentence"), REFUSED.items())
def test_what_cannot_be_planned_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(words)


@pytest.mark.parametrize("words", ["", "model=qwen2.5_7B draft=qwen2.5_0.5B"])
def test_sound_settings_pass(words: str) -> None:
    check(words)


def test_problems_of_hardware_and_settings_are_one_message(own_conf: OwnConf) -> None:
    own_conf("model/mine.yaml", "defaults: [30B, _self_]\nname: mine\nshape: {hidden_size: -1}\n")
    words = ["hardware.num_gpus=0", "batch_size=0", "speculation.num_draft_tokens=0", "speculation.acceptance=1.5"]
    with pytest.raises(ConfigError, match=r"^5 problems") as caught:
        check(" ".join(["model=mine", *words]))
    assert all(word in str(caught.value) for word in [*words, "hidden_size=-1"])


def test_stages_are_no_more_than_the_layers_of_the_target() -> None:
    (composed,) = compose(["placement.target.stages=11"])
    with pytest.raises(ConfigError, match="stages=11 is more than the 10 layers of model=tiny: use fewer stages"):
        checks.check_values(to_run_config(composed))
