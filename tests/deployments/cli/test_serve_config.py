"""The configuration that `raydix serve` hands to Serve, and mistakes that it refuses before anything starts."""

import socket
from pathlib import Path

import pytest
import yaml

from deployments.cli.errors import UserError
from deployments.cli.serve_config import EMBEDDED_MODEL, Overrides, address, check_port, load, models

ROOT = Path(__file__).parents[3]


def written(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text)
    return path


def test_without_a_file_it_serves_the_models_of_the_shipped_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = load(ROOT / "deployments.yaml", Overrides())
    monkeypatch.chdir(tmp_path)
    assert load(None, Overrides()) == shipped == EMBEDDED_MODEL
    monkeypatch.chdir(ROOT)
    assert load(None, Overrides()) == shipped


def test_a_file_in_the_directory_takes_precedence_over_the_built_in_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deployments.yaml").write_text("applications: [{name: mine, import_path: 'a:b'}]")
    monkeypatch.chdir(tmp_path)
    assert load(None, Overrides())["applications"] == [{"name": "mine", "import_path": "a:b"}]


def test_options_go_before_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        http_options: {request_timeout_s: 5}
        applications:
          - name: raydix
            import_path: deployments.app:build
            args:
              engine: {model: big, model_revision: a1b2, served_name: alias, page_size: 8, kv_pages: 9, threads: 1}
              engines: {count: 3, num_cpus: 2}
              ingresses: {port: 9000}
        """,
    )
    config = load(path, Overrides(host="0.0.0.0", model="other", replicas=5))
    assert (config["http_options"], config["proxy_location"]) == ({"request_timeout_s": 5}, "Disabled")
    args = config["applications"][0]["args"]
    assert args == {
        "engine": {"model": "other", "page_size": 8},
        "engines": {"count": 5, "num_cpus": 2},
        "ingresses": {"host": "0.0.0.0", "port": 9000},
    }
    assert models(config) == [("other", None)]
    assert load(path, Overrides(port=1))["applications"][0]["args"]["engine"]["served_name"] == "alias"


def test_without_an_address_only_this_machine_can_connect(tmp_path: Path) -> None:
    others = load(written(tmp_path, "applications: [{name: x, import_path: 'theirs:app'}]"), Overrides())
    assert others["http_options"] == {"host": "127.0.0.1", "port": 8000}
    ours = "applications: [{name: x, import_path: 'deployments.app:build'}]"
    assert address(load(written(tmp_path, ours), Overrides())) == ("127.0.0.1", 8000)


def test_a_number_of_replicas_replaces_autoscaling(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        applications:
          - name: raydix
            import_path: deployments.app:build
            args: {engines: {num_cpus: 2, autoscaling: {min: 1, max: 4}}}
        """,
    )
    config = load(path, Overrides(replicas=3))
    assert config["applications"][0]["args"]["engines"] == {"count": 3, "num_cpus": 2}
    assert "autoscaling" in load(path, Overrides(port=1))["applications"][0]["args"]["engines"]


def test_another_model_takes_over_no_size_of_the_demo_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped file's included, but where clients connect, and all that is not a size."""
    monkeypatch.chdir(tmp_path)
    mine = written(
        tmp_path,
        """
        applications:
          - name: raydix
            import_path: deployments.app:build
            args:
              engine: {kv_pages: 9, threads: 1, page_size: 8}
              engines: {count: 3, num_cpus: 0.25, drain_timeout_s: 5}
              ingresses: {count: 2, num_cpus: 0.25, port: 9000}
              limits: {max_choices: 3}
        """,
    )
    for path, engine, engines, port in (
        (None, {}, {}, 8000),
        (ROOT / "deployments.yaml", {}, {}, 8000),
        (mine, {"page_size": 8}, {"drain_timeout_s": 5}, 9000),
    ):
        args = load(path, Overrides(model="other"))["applications"][0]["args"]
        assert (args["engine"], args["engines"]) == ({"model": "other", **engine}, engines)
        assert args["ingresses"].get("count") is None and args["ingresses"]["port"] == port
    assert args["limits"] == {"max_choices": 3}


def test_a_number_of_gpus_is_the_engine_s(tmp_path: Path) -> None:
    args = load(None, Overrides(model="other", tensor_parallel=2))["applications"][0]["args"]
    assert args["engine"] == {"model": "other", "tensor_parallel_size": 2}
    stages = load(None, Overrides(model="other", pipeline_parallel=3))["applications"][0]["args"]
    assert stages["engine"] == {"model": "other", "pipeline_parallel_size": 3}
    parts = load(None, Overrides(model="other", tensor_parallel=4, context_parallel=2))["applications"][0]["args"]
    assert parts["engine"] == {"model": "other", "tensor_parallel_size": 4, "context_parallel_size": 2}
    several = "applications: [{name: x, import_path: 'deployments.app:build', args: {models: [{}]}}]"
    with pytest.raises(UserError, match="--context-parallel and --tensor-parallel need"):
        load(written(tmp_path, several), Overrides(context_parallel=2))
    with pytest.raises(UserError, match="--tensor-parallel need a config with one model"):
        load(written(tmp_path, several), Overrides(tensor_parallel=2))
    with pytest.raises(UserError, match="need a config with one model"):
        load(written(tmp_path, several), Overrides(pipeline_parallel=2))


def test_the_built_in_config_is_not_changed_by_options() -> None:
    before = yaml.safe_dump(EMBEDDED_MODEL)
    load(None, Overrides(port=1, model="x", replicas=9))
    assert yaml.safe_dump(EMBEDDED_MODEL) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "is not YAML"),
        ("", r"it is empty\. Expected YAML with `applications:`"),
        ("# a comment", r"it is empty\. Expected YAML"),
        ("applications: []", r"it has no list of applications\. Expected YAML .*deployments\.app:build"),
        ("[1, 2]", "has no list of applications"),
        ("applications: {a: 1}", "has no list of applications"),
        (
            "applications: [{name: x, import_path: 'deployments.app:build', args: {engine: {pages: 3}}}]",
            r"args\.engine: .*unknown setting 'pages'",
        ),
        (
            "applications: [{name: x, import_path: 'deployments.app:build', args: {engines: {count: 0}}}]",
            r"args\.engines\.count: .*greater than or equal to 1",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        load(path, Overrides())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{engine: {kv_page: 3}}", "args.engine: unknown setting 'kv_page'; did you mean kv_pages?"),
        ("{engnie: {}}", "args: unknown setting 'engnie'; did you mean engine?"),
        ("{limits: {zzz: 3}}", "args.limits: unknown setting 'zzz'; docs/tuning.md lists all settings"),
        (
            "{engine: {speculation: {methd: ngram}}}",
            "args.engine: speculation: unknown setting 'methd'; did you mean method?",
        ),
        ("{models: [{engines: {count: x}}]}", "args.models.0.engines.count: must be an integer"),
        ("{router: {max_blocks: x}}", "args.router.max_blocks: must be an integer or 'auto'"),
        ("{tenants: {a: {}}}", "args.tenants: must be a list"),
        ("{limits: null}", "args.limits: must be a mapping of settings"),
        ("[1]", "args: must be a mapping of settings"),
        ("{engine: {max_running: 0}}", "args.engine: max_running must be in [1, 1099511627776], got 0"),
    ],
)
def test_a_wrong_setting_is_described_without_pythons_terms(tmp_path: Path, args: str, message: str) -> None:
    path = written(tmp_path, f"applications: [{{import_path: 'deployments.app:build', args: {args}}}]")
    with pytest.raises(UserError) as caught:
        load(path, Overrides())
    assert str(caught.value) == f"{path}: {message}"


def test_a_removed_setting_is_left_out_with_a_warning_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(
        tmp_path,
        "applications: [{import_path: 'deployments.app:build', args: {wire: {turn_bytes: 5, handshake_s: 3}}}]",
    )
    assert load(path, Overrides())["applications"][0]["args"]["wire"] == {"handshake_s": 3}
    line = f"warning: {path}: wire.turn_bytes is no longer a setting: Raydix uses 4 MiB; remove it"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nope\.yaml: no such file") as caught:
        load(tmp_path / "nope.yaml", Overrides())
    assert caught.value.exit_code == 2


def test_model_and_replicas_need_our_application(tmp_path: Path) -> None:
    path = written(tmp_path, "applications: [{name: x, import_path: 'a:b'}]")
    with pytest.raises(UserError, match="need an application with import_path"):
        load(path, Overrides(replicas=2))


def test_a_taken_port_is_found_and_a_free_one_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port} .*in use.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_reported() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        check_port("192.0.2.1", 8000)


def test_an_ingress_gets_the_address_and_the_proxy_is_off(tmp_path: Path) -> None:
    ours = "applications: [{import_path: 'deployments.app:build', args: {ingresses: {host: 0.0.0.0, port: 8100}}}]"
    path = written(tmp_path, ours)
    config = load(path, Overrides())
    assert (address(config), config["proxy_location"]) == (("0.0.0.0", 8100), "Disabled")
    assert address(load(path, Overrides(host="127.0.0.1", port=9000))) == ("127.0.0.1", 9000)
    assert address(load(None, Overrides(port=9001))) == ("127.0.0.1", 9001)


def test_a_proxy_gets_the_address_when_clients_connect_to_it(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        http_options: {host: 0.0.0.0, request_timeout_s: 5}
        applications: [{import_path: "deployments.app:build", args: {ingresses: {http: serve}}}]
        """,
    )
    config = load(path, Overrides(port=9000))
    assert config["http_options"] == {"host": "0.0.0.0", "port": 9000, "request_timeout_s": 5}
    assert address(config) == ("0.0.0.0", 9000)
    assert "proxy_location" not in config and "port" not in config["applications"][0]["args"]["ingresses"]


@pytest.mark.parametrize("option", ["host: 0.0.0.0", "port: 9000"])
def test_the_address_of_a_proxy_that_no_client_needs_is_refused(tmp_path: Path, option: str) -> None:
    ours = "applications: [{name: x, import_path: 'deployments.app:build'}]"
    name = option.split(":")[0]
    with pytest.raises(UserError, match=rf"http_options\.{name} .* args\.ingresses\.{name} instead"):
        load(written(tmp_path, f"http_options: {{{option}}}\n{ours}"), Overrides())
    both = f"proxy_location: HeadOnly\nhttp_options: {{{option}}}\n{ours}"
    assert address(load(written(tmp_path, both), Overrides())) == ("127.0.0.1", 8000)


def test_the_proxy_stays_for_an_application_next_to_one_that_listens_itself(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(
        """
        applications:
          - {name: a, import_path: "deployments.app:build", args: {ingresses: {port: 8100}}}
          - {name: b, import_path: "other:app"}
        """
    )
    config = load(path, Overrides(host="0.0.0.0"))
    assert "proxy_location" not in config and config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert address(config) == ("0.0.0.0", 8100)
