"""What is chosen for machines with no, one and eight GPUs, and what is refused there."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.config.args import AppArgs
from deployments.config.chosen import CannotMeet, Effective, ModelFacts, choose
from deployments.config.machine import Hardware, HardwareNode, VisibleGpu
from deployments.simulator.planning.known import planned_model
from engine.settings.config import EngineConfig

GIB = 2**30
SMALL, LARGE = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"


def machine(num_gpus: int, gib: float | None = 79.1, *, cores: int = 32, may_grow: bool = False) -> Hardware:
    """One node with GPUs of that size."""
    memory = None if gib is None else int(gib * GIB)
    return Hardware(
        (HardwareNode(cores, 2 * cores, (VisibleGpu("NVIDIA H100", memory),) * num_gpus, cache="/c"),), may_grow
    )


def facts(config: EngineConfig) -> ModelFacts | None:
    return None if config.model == "elsewhere" else planned_model(config.model).facts


def chosen(args: dict[str, Any], on: Hardware) -> Effective:
    """What is chosen for one application. What was given stays, and choosing again changes nothing."""
    [effective] = choose([args], on, facts)
    for section, values in args.items():
        if isinstance(values, dict):
            assert effective.args[section] == {**effective.args[section], **{
                name: value for name, value in values.items() if (name, value) != ("device", "auto")
            }}  # fmt: skip
    assert choose([effective.args], on, facts)[0].args == effective.args
    AppArgs.model_validate(effective.args)
    return effective


def setting(effective: Effective, path: str) -> Any:
    """A setting in effect: what was chosen, or what the arguments mean."""
    for choice in effective.choices:
        if choice.path == path:
            return choice.value
    section, name = path.split(".")
    return getattr(getattr(AppArgs.model_validate(effective.args), section), name)


def reason(effective: Effective, path: str) -> str:
    [found] = [choice.reason for choice in effective.choices if choice.path == path]
    return found


def test_one_gpu_gets_one_engine_that_has_it_to_itself() -> None:
    here = chosen({"engine": {"model": SMALL}}, machine(1))
    assert setting(here, "engine.device") == "cuda"
    assert reason(here, "engine.device") == "1 GPU is visible (NVIDIA H100, 79.1 GiB)"
    assert [setting(here, f"engines.{name}") for name in ("count", "num_gpus", "num_cpus")] == [1, 1, 1]
    assert setting(here, "engine.tensor_parallel_size") == 1
    assert (setting(here, "engine.kv_memory_share"), setting(here, "engine.max_step_tokens")) == (0.9, 8192)
    assert setting(here, "ingresses.count") == 4
    assert AppArgs.model_validate(here.args).served["EngineReplica"].gpus_per_engine == 1, "Ray reserves it"


def test_eight_gpus_get_eight_engines_or_as_many_as_hold_the_model() -> None:
    assert setting(chosen({"engine": {"model": SMALL}}, machine(8)), "engines.count") == 8
    large = chosen({"engine": {"model": LARGE}}, machine(8))
    assert setting(large, "engine.tensor_parallel_size") == 4, "two hold 131.4 GiB of weights, but no KV beside"
    assert setting(large, "engines.count") == 2
    assert reason(large, "engines.count") == (
        "one engine for 4 GPUs, and 8 GPUs are visible (NVIDIA H100, 79.1 GiB)"
    )


def test_a_model_that_needs_two_gpus_gets_two() -> None:
    two = chosen({"engine": {"model": LARGE, "max_model_len": 16384}}, machine(8, 79.1))
    assert (setting(two, "engine.tensor_parallel_size"), setting(two, "engines.count")) == (2, 4)
    cards = chosen({"engine": {"model": SMALL}}, machine(2, 21.9))
    assert (setting(cards, "engine.tensor_parallel_size"), setting(cards, "engines.count")) == (2, 1)
    assert "on no fewer" in reason(cards, "engine.tensor_parallel_size")


def test_a_model_that_fits_nowhere_is_refused_with_numbers_and_settings_that_would_fit() -> None:
    with pytest.raises(CannotMeet, match=r"one GPU of 79\.1 GiB .*weights take 13\d\.\d+ GiB"):
        chosen({"engine": {"model": LARGE}}, machine(1))
    with pytest.raises(CannotMeet, match=r"one GPU of 21\.9 GiB .*set max_model_len to at most \d+"):
        chosen({"engine": {"model": SMALL}}, machine(1, 21.9))
    chosen({"engine": {"model": SMALL, "max_model_len": 8192}}, machine(1, 21.9))


def test_each_stage_of_a_pipeline_has_as_few_gpus_as_hold_its_layers() -> None:
    """Llama 70B: two GPUs hold half of the layers with the KV of the longest request, as four hold them all."""
    here = chosen({"engine": {"model": LARGE, "pipeline_parallel_size": 2}}, machine(8))
    assert (setting(here, "engine.tensor_parallel_size"), setting(here, "engines.count")) == (2, 2)
    said = "fit on 2 GPUs of 79.1 GiB in each of 2 stages, and on no fewer"
    assert said in reason(here, "engine.tensor_parallel_size")
    assert reason(here, "engines.count").startswith("one engine for 4 GPUs")
    assert AppArgs.model_validate(here.args).served["EngineReplica"].gpus_per_engine == 4, "Ray reserves them"
    eight = chosen({"engine": {"model": LARGE, "pipeline_parallel_size": 4}}, machine(8))
    assert (setting(eight, "engine.tensor_parallel_size"), setting(eight, "engines.count")) == (1, 2)


def test_stages_may_be_on_several_nodes_but_the_gpus_of_one_on_one() -> None:
    """LARGE needs stages of two GPUs here. Two nodes of three have room for two such stages, not for three."""
    nodes = Hardware(machine(3).nodes * 2)
    here = chosen({"engine": {"model": LARGE, "pipeline_parallel_size": 2}}, nodes)
    assert (setting(here, "engine.tensor_parallel_size"), setting(here, "engines.count")) == (2, 1)
    with pytest.raises(CannotMeet, match=r"has 3 stages .*, each on one machine .*, of 2 GPUs"):
        chosen({"engine": {"model": LARGE, "pipeline_parallel_size": 3, "tensor_parallel_size": 2}}, nodes)
    args = {"engine": {"model": LARGE, "pipeline_parallel_size": 3, "tensor_parallel_size": 2}}
    growing = Hardware(nodes.nodes, may_grow=True)
    [warning] = chosen(args, growing).warnings
    assert "has 3 stages" in warning and "the machines are 2 with 3 GPUs" in warning


def test_pipelines_that_the_gpus_cannot_hold_are_refused_with_numbers() -> None:
    for engine, on, message in (
        ({"pipeline_parallel_size": 4}, machine(2), "pipeline_parallel_size is 4, but 2 GPUs are .* lower it"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            machine(3),
            "pipeline_parallel_size is 2 and engine.tensor_parallel_size is 2, together 4 GPUs, but 3 GPUs are",
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
            machine(2),
            "on one GPU of 79.1 GiB .* the weights of stage 0 of 2 take 6[0-9]",
        ),
        ({"pipeline_parallel_size": 2}, machine(2), "one GPU of 79.1 GiB in each of 2 stages .* max_model_len"),
        ({"pipeline_parallel_size": 33, "model": SMALL}, machine(64), "the 32 layers .* at most 32 stages"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            choose([{"engine": {"model": LARGE, **engine}}], on, facts)
    [effective] = choose(
        [{"engine": {"model": LARGE, "pipeline_parallel_size": 4}}], machine(2, may_grow=True), facts
    )
    assert "has 4 stages" in effective.warnings[0] and "the machines are 1 with 2 GPUs" in effective.warnings[0]


def test_a_model_that_only_a_pipeline_would_hold_is_refused_with_its_stages() -> None:
    """Three GPUs cannot share the heads, and one node of two is too small; stages make use of both."""
    with pytest.raises(
        CannotMeet, match=r"set engine\.pipeline_parallel_size to 3: then 3 stages on one GPU each"
    ):
        chosen({"engine": {"model": LARGE, "max_model_len": 16384}}, machine(3, 60))
    nodes = Hardware(machine(2).nodes * 2)
    with pytest.raises(CannotMeet, match=r"pipeline_parallel_size to 2: then 2 stages on 2 GPUs each hold it"):
        chosen({"engine": {"model": LARGE}}, nodes)
    here = chosen({"engine": {"model": LARGE, "pipeline_parallel_size": 2}}, nodes)
    assert (setting(here, "engine.tensor_parallel_size"), setting(here, "engines.count")) == (2, 1)
    with pytest.raises(CannotMeet, match="the model does not fit") as caught:
        chosen({"engine": {"model": LARGE, "tensor_parallel_size": 1}}, machine(2, 60))
    assert "pipeline" not in str(caught.value), "two such stages are too large, too"


def test_stages_on_cpus_reserve_and_share_the_cores() -> None:
    args = {"engine": {"model": SMALL, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}}
    here = chosen(args, machine(0, cores=9))
    assert setting(here, "engine.threads") == 2 and "4 engine processes" in reason(here, "engine.threads")
    with pytest.raises(CannotMeet, match=r"reserve 16\.5 CPUs in Ray, but there are 16"):
        chosen(
            {**args, "engines": {"num_cpus": 4}, "ingresses": {"count": 2, "num_cpus": 0.25}}, machine(0, cores=8)
        )


def test_without_gpus_one_engine_has_all_cores() -> None:
    here = chosen({"engine": {"model": SMALL}}, machine(0, cores=2))
    assert setting(here, "engine.device") == "cpu" and reason(here, "engine.device") == "no GPU is visible"
    assert setting(here, "engines.count") == 1
    assert setting(here, "engine.threads") == 2 and "one for each of 2 cores" in reason(here, "engine.threads")
    assert "threads" not in here.args["engine"], "each replica counts the cores of its own node"
    assert (setting(here, "engine.kv_memory_share"), setting(here, "engine.max_step_tokens")) == (0.25, 2048)
    assert AppArgs.model_validate(here.args).served["EngineReplica"].engines.num_cpus < 1, "Ray sets no threads"


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (128, 4)])
def test_ingresses_are_as_many_as_a_quarter_of_the_cores_at_most_four(cores: int, count: int) -> None:
    assert setting(chosen({}, machine(0, cores=cores)), "ingresses.count") == count


def test_the_chosen_numbers_fit_the_cores_while_the_ingresses_are_replaced() -> None:
    for cores in (1, 2, 4, 8, 12, 16, 64):
        for gpus in (0, 1, 8):
            on = Hardware((HardwareNode(cores, cores, (VisibleGpu("G", 80 * GIB),) * gpus),))
            args = AppArgs.model_validate(chosen({"engine": {"model": SMALL}}, on).args)
            needed = args.engines.count * args.engines.num_cpus
            assert needed + 2 * args.ingresses.count * args.ingresses.num_cpus <= cores, (cores, gpus)


def test_several_ingresses_share_stored_responses_or_there_is_one() -> None:
    shared = chosen({"ingresses": {"port": 9000}}, machine(0))
    assert (setting(shared, "ingresses.count"), setting(shared, "responses.store")) == (
        4,
        "file:///c/responses-9000",
    )
    kept = chosen({"responses": {"store": "memory"}}, machine(0))
    assert setting(kept, "ingresses.count") == 1 and "memory" in reason(kept, "ingresses.count")
    off = chosen({"responses": {"max_bytes": 0}}, machine(0))
    assert (setting(off, "ingresses.count"), setting(off, "responses.store")) == (4, "memory")
    nodes = Hardware(machine(0).nodes * 2, may_grow=True)
    assert setting(chosen({}, nodes), "ingresses.count") == 1, "they have no directory in common"


def test_numbers_of_replicas_change_nothing_that_restarts_one() -> None:
    """`raydix deploy` gives them apart from the arguments, and Serve builds with the arguments alone."""
    for on in (machine(0), machine(8)):
        without = {"engine": {"model": SMALL, "device": "auto"}}
        for counts in ({"engines": {"count": 3}}, {"ingresses": {"count": 4}}):
            args = chosen({**without, **counts}, on).args
            left = chosen(without, on).args
            assert left.pop("responses")["store"] in (args.pop("responses")["store"], "file:///c/responses-8000")
            for each in (args, left):
                each["engines"].pop("count")
                each["ingresses"].pop("count")
            assert args == left


def test_the_embedded_model_stays_on_a_core_and_two_replicas_of_it_share_no_gpu() -> None:
    demo = {"engine": {"model": "demo", "threads": 1}, "engines": {"count": 2, "num_cpus": 0.25}}
    here = chosen(demo, machine(1))
    assert (setting(here, "engine.device"), here.args["engines"]) == ("cpu", demo["engines"])
    assert setting(chosen({"engine": {"device": "cuda"}}, machine(1)), "engines.num_gpus") == 1


def test_given_settings_that_the_machine_cannot_meet_are_refused_with_numbers() -> None:
    one, none = machine(1), machine(0)
    for args, on, message in (
        ({"engine": {"device": "cuda"}}, none, 'engine.device is "cuda", but no GPU is visible'),
        ({"engine": {"model": SMALL}, "engines": {"num_gpus": 1}}, none, "engines.num_gpus is 1, but no GPU"),
        ({"engine": {"model": SMALL}, "engines": {"count": 2}}, one, r"2 engines .* take 2 GPUs, but 1 GPU is"),
        ({"engine": {"model": SMALL, "tensor_parallel_size": 2}}, one, "tensor_parallel_size is 2, but 1 GPU is"),
        ({"engine": {"model": LARGE, "tensor_parallel_size": 2}}, machine(2, 60), r"on 2 GPUs of 60\.0 GiB"),
        ({"engines": {"count": 9, "num_cpus": 8}}, machine(0, cores=32), r"reserve 7\d CPUs in Ray, but .* 64"),
    ):  # fmt: skip
        with pytest.raises(CannotMeet, match=message):
            choose([args], on, facts)


def test_a_cluster_that_may_grow_is_warned_of() -> None:
    args = {"engine": {"model": SMALL}, "engines": {"count": 2}}
    [effective] = choose([args], machine(1, may_grow=True), facts)
    assert len(effective.warnings) == 1 and "take 2 GPUs, but 1 GPU is visible" in effective.warnings[0]
    [awaited] = choose([{"engine": {"device": "cuda"}}], machine(0, may_grow=True), facts)
    assert awaited.warnings and setting(awaited, "engines.count") == 1


def test_several_models_get_an_engine_each() -> None:
    models = [{"engine": {"model": SMALL, "served_name": name}} for name in ("a", "b")]
    [effective] = choose([{"models": models}], machine(8), facts)
    args = AppArgs.model_validate(effective.args)
    assert [model.engines.count for model in args.served.values()] == [1, 1]
    assert [model.gpus_per_engine for model in args.served.values()] == [1, 1]
    with pytest.raises(CannotMeet, match="1 engine of a with 1 each and 1 engine of b with 1 each take 2 GPUs"):
        choose([{"models": models}], machine(1), facts)
    with pytest.raises(CannotMeet, match="take 2 GPUs"):
        choose([{"engine": models[0]["engine"]}, {"engine": models[1]["engine"]}], machine(1), facts)


def test_autoscaling_and_roles_determine_the_number_of_engines() -> None:
    scaled = chosen({"engine": {"model": SMALL}, "engines": {"autoscaling": {"min": 1, "max": 3}}}, machine(8))
    assert "count" not in scaled.args["engines"]


def test_a_part_of_a_gpu_leaves_memory_to_others() -> None:
    half = chosen({"engine": {"model": SMALL}, "engines": {"num_gpus": 0.5, "count": 2}}, machine(1))
    assert setting(half, "engine.kv_memory_share") == 0.25
    pages = chosen({"engine": {"model": SMALL, "kv_pages": 900}, "engines": {"num_gpus": 0.5}}, machine(1))
    assert "kv_memory_share" not in pages.args["engine"] and setting(pages, "engines.count") == 1


def test_no_reserved_gpu_means_a_cpu() -> None:
    assert (
        setting(chosen({"engine": {"model": SMALL}, "engines": {"num_gpus": 0}}, machine(1)), "engine.device")
        == "cpu"
    )


def test_unknown_hardware_is_refused_unless_the_device_is_given() -> None:
    blind = Hardware((HardwareNode(8, 16, unknown="NVML cannot list the GPUs: give engine.device"),))
    with pytest.raises(CannotMeet, match="NVML cannot list"):
        choose([{"engine": {"model": SMALL}}], blind, facts)
    chosen({"engine": {"model": SMALL, "device": "cpu"}}, blind)
    given = chosen({"engine": {"model": SMALL, "device": "cuda"}}, blind)
    assert (setting(given, "engines.count"), setting(given, "engines.num_gpus")) == (1, 1)


def test_unknown_sizes_choose_one_gpu_with_the_reason() -> None:
    for args, on, said in (
        ({"engine": {"model": "elsewhere"}}, machine(2), "files are not here"),
        ({"engine": {"model": LARGE}}, machine(2, None), "memory is not known"),
    ):
        here = chosen(args, on)
        assert setting(here, "engine.tensor_parallel_size") == 1 and setting(here, "engines.count") == 2
        assert said in reason(here, "engine.tensor_parallel_size")


def test_a_torch_without_cuda_does_not_use_the_gpus() -> None:
    on = Hardware((HardwareNode(8, 8, (VisibleGpu("NVIDIA L4", 22 * GIB),), has_cuda=False),))
    here = chosen({"engine": {"model": SMALL}}, on)
    assert setting(here, "engine.device") == "cpu" and "without CUDA" in reason(here, "engine.device")
    with pytest.raises(CannotMeet, match="built without CUDA"):
        choose([{"engine": {"device": "cuda"}}], on, facts)


def test_engines_of_a_cluster_lie_on_one_node_each() -> None:
    nodes = machine(3).nodes + machine(2).nodes
    large = chosen({"engine": {"model": LARGE, "max_model_len": 16384}}, Hardware(nodes, may_grow=True))
    assert (setting(large, "engine.tensor_parallel_size"), setting(large, "engines.count")) == (2, 2)


def test_the_shown_threads_are_those_that_a_replica_will_find() -> None:
    given = chosen({"engines": {"num_cpus": 3}}, machine(0))
    assert setting(given, "engine.threads") == 3
    many = chosen({"engines": {"count": 3}}, machine(0, cores=16))
    assert setting(many, "engine.threads") == 5 and "3 engine processes" in reason(many, "engine.threads")
    omp = chosen({}, Hardware((HardwareNode(16, 16, omp_threads=7),)))
    assert (setting(omp, "engine.threads"), reason(omp, "engine.threads")) == (7, "OMP_NUM_THREADS")


def cluster_of(*gpus: int, may_grow: bool = False) -> Hardware:
    """Nodes with so many GPUs and 16 CPUs each."""
    return Hardware(tuple(machine(count, cores=8).nodes[0] for count in gpus), may_grow)


STAGES = {"model": SMALL, "device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("placement", "gpus", "count"),
    [("stages", (2, 2), 1), ("stages", (4, 2, 2), 2), ("pack", (4, 2, 2), 1), ("spread", (6, 2), 1)],
)
def test_as_many_engines_as_their_stages_have_room(placement: str, gpus: tuple[int, ...], count: int) -> None:
    here = chosen({"engine": STAGES, "engines": {"placement": placement}}, cluster_of(*gpus))
    assert setting(here, "engines.count") == count
    assert f"one engine for 4 GPUs, and {sum(gpus)} GPUs are visible" in reason(here, "engines.count")


@pytest.mark.parametrize(
    ("engines", "gpus", "where"),
    [
        ({"placement": "pack"}, (2, 2), "all on one machine"),
        ({"placement": "spread"}, (8,), "each on a machine of its own"),
        ({}, (1, 1, 2), "each on one machine"),
        ({"num_cpus": 9}, (2, 2), "each on one machine"),
    ],
)
def test_stages_without_room_are_refused_or_a_warning_where_the_cluster_may_grow(
    engines: dict[str, Any], gpus: tuple[int, ...], where: str
) -> None:
    args = {"engine": STAGES, "engines": {"count": 1, "num_cpus": 1, **engines}}
    said = rf"has 2 stages .*, {where} .*, of 2 GPUs and \d+ CPUs each .*, but the machines are \d with \d GPUs"
    with pytest.raises(CannotMeet, match=said):
        chosen(args, cluster_of(*gpus))
    [warning] = chosen(args, cluster_of(*gpus, may_grow=True)).warnings
    assert where in warning
