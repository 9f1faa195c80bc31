"""URLs of engines: found by scheme, settings checked, secrets never shown."""

from __future__ import annotations

import ssl
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import trustme
from bucket_stand_in import BucketStandIn
from memory_pool import PoolObjects

from tq_service.errors import InvalidArgumentError, TqError
from tq_service.objects import base
from tq_service.objects.base import EngineUrl, make_object_store, object_store_schemes

SECRET = "hidden-from-logs"


def test_unknown_schemes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no engine has the scheme 's4'.*known: 's3'"):
        make_object_store("s4://bucket")
    with pytest.raises(InvalidArgumentError, match="expected a URL"):
        make_object_store("bucket")
    assert {"az", "file", "gs", "memory", "mooncake", "s3", "valkey"} <= set(object_store_schemes())


def test_packages_add_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        EntryPoint("mine", "memory_pool:PoolObjects.from_url", base.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:nothing", base.ENTRY_POINT_GROUP),
        EntryPoint("other", "builtins:str", base.ENTRY_POINT_GROUP),
    )
    monkeypatch.setattr(base, "_entry_points", lambda: points)
    assert isinstance(make_object_store("mine://pool-of-a-package"), PoolObjects)
    with pytest.raises(InvalidArgumentError, match="could not load the engine no_such_module:nothing: ModuleNotFound"):
        make_object_store("broken://x")
    with pytest.raises(InvalidArgumentError, match="returned str; expected a subclass"):
        make_object_store("other://x")


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("s3://b", "obstore", "obstore"), ("valkey://h", "redis", "valkey"), ("mooncake://h", "mooncake", "mooncake")],
)
def test_an_engine_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("buckets", "valkey", "mooncake"):
        monkeypatch.delitem(sys.modules, f"tq_service.objects.{name}", raising=False)
    with pytest.raises(InvalidArgumentError, match=rf"Install tq-service\[{extra}\]"):
        make_object_store(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://p?copies=-1", "copies is '-1'; expected a whole number"),
        ("memory://p?copies=1&copies=2", "copies is set 2 times"),
        ("memory://", "expected memory://NAME or memory://NAME/PREFIX"),
        ("gs://b?service_account_file=/nowhere", "Unable to open service account file"),
        ("az://container", "see docs/engines.md"),
        ("file:///d?survives=war", "survives is 'war'; expected one of process, node, power"),
        ("file:///d?timeout_seconds=0", "expected a number of seconds greater than 0"),
        ("file://relative/d", "with three slashes"),
        ("file:///d?secret_file=x", "unknown settings secret_file"),
    ],
)
def test_wrong_settings_say_what_is_expected(url: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_object_store(url)


def test_a_url_is_shown_without_its_secrets() -> None:
    url = EngineUrl(f"s3://key:{SECRET}@bucket/prefix?token={SECRET}#{SECRET}")
    assert url.redacted == "s3://bucket/prefix"
    assert (url.username, url.password, url.host, url.path) == ("key", SECRET, "bucket", "prefix")
    with pytest.raises(InvalidArgumentError) as wrong:
        url.check_all_used()
    assert SECRET not in str(wrong.value)


def test_secrets_come_from_files_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    monkeypatch.setenv("SOME_VARIABLE", "of the environment")
    assert EngineUrl(f"s3://b?key_file={tmp_path}/secret").secret("key", "SOME_VARIABLE") == SECRET
    assert EngineUrl("s3://b").secret("key", "SOME_VARIABLE") == "of the environment"
    assert EngineUrl("s3://b").secret("key", "ABSENT_VARIABLE") is None
    with pytest.raises(InvalidArgumentError, match=r"key_file is .*gone, which cannot be read"):
        EngineUrl(f"s3://b?key_file={tmp_path}/gone").secret("key", "SOME_VARIABLE")


async def test_s3_over_tls_with_an_authority_of_its_own_and_credentials_of_files(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = BucketStandIn(context)
    try:
        (tmp_path / "key").write_text("key")
        (tmp_path / "secret").write_text(SECRET)
        files = f"access_key_file={tmp_path}/key&secret_key_file={tmp_path}/secret"
        url = f"s3://objects?endpoint=https://127.0.0.1:{server.port}&region=r&timeout_seconds=5"
        store = make_object_store(f"{url}&{files}&ca_file={tmp_path}/ca.pem")
        await store.open("node", 0)
        assert await store.put("c/s/0/p/0.0", [b"bytes"], copies=1) == 1
        await store.aclose()
        untrusting = make_object_store(f"{url}&{files}")
        with pytest.raises(TqError) as refused:
            await untrusting.open("node", 0)
        await untrusting.aclose()
        unknown = make_object_store(f"{url.replace('objects', f'nobody:{SECRET}@objects')}&ca_file={tmp_path}/ca.pem")
        with pytest.raises(InvalidArgumentError, match="InvalidAccessKeyId") as rejected:
            await unknown.open("node", 0)
        await unknown.aclose()
        assert SECRET not in str(refused.value) + str(rejected.value)
    finally:
        server.close()
