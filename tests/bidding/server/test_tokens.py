"""Tokens of a file: names, rights and rates, read again while the server runs."""

import io
import os
from hashlib import sha256

import pytest

from decisionllm.bidding.server import logs
from decisionllm.bidding.server.access import TokenAccess, required_right
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.rate_limit import TokenBucket
from decisionllm.bidding.server.secret_file import list_exposures
from decisionllm.bidding.server.tokens import Tokens, parse_tokens
from decisionllm.bidding.server.watched_file import WatchedFile
from tests.bidding.server.test_campaigns import SPEC, drawn, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.bidding.server.test_logs import lines, until

BIDDER, READER, OPERATOR = (f"{name}-0123456789abcdef" for name in ("bidder", "reader", "operator"))
FILE = f"""
[bidder]
token = "{BIDDER}"
rights = ["bid"]

[reader]
sha256 = "{sha256(READER.encode()).hexdigest()}"
rights = ["read"]

[operator]
token = "{OPERATOR}"
rights = ["operate", "read"]
"""


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def replaced(path, text):
    """Write a file as an operator does who replaces it in one step."""
    os.replace(written(path.with_name("new"), text), path)


def written(path, text=FILE, mode=0o600):
    """A file of tokens with this mode, whatever the umask is."""
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.fixture
def served(tmp_path):
    path = written(tmp_path / "tokens.toml")
    access = TokenAccess("the single one", path)
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, access=access)) as client:
        client.path, client.access = path, access
        yield client


def test_a_request_needs_the_right_of_its_method_and_path(served):
    def status(token, path, body=None):
        headers = bearer(token)
        if body is None:
            return served.get(path, headers=headers).status_code
        return served.post(path, json=body, headers=headers).status_code

    opens = settings_of(0)
    assert [status(BIDDER, "/v1/campaigns", opens), status(BIDDER, "/metrics")] == [201, 403]
    assert [status(READER, "/v1/campaigns", opens), status(READER, "/metrics")] == [403, 200]
    assert [status(OPERATOR, "/v1/models", {}), status(BIDDER, "/v1/models", {})] == [404, 403]
    assert status("the single one", "/v1/campaigns", opens) == 201
    assert status("the single one", "/v1/models", {}) == 404, "it has all rights"
    assert (
        required_right("DELETE", "/v1/campaigns/x")
        == "bid"
        == required_right("POST", "/openrtb/2.6/bid")
    )


def test_a_token_is_rotated_without_a_restart(served, caplog):
    newer = "newer-0123456789abcdef"
    replaced(served.path, FILE.replace(READER, newer).replace(BIDDER, newer))
    served.access.file.poll()
    codes = [
        served.post("/v1/campaigns", json=settings_of(0), headers=bearer(token)).status_code
        for token in (BIDDER, newer)
    ]
    assert codes == [401, 201]
    for broken in ("[bidder", "", '[bidder]\ntoken = "short"\nrights = ["bid"]'):
        replaced(served.path, broken)
        served.access.file.poll()
        served.access.file.poll()
        assert served.get("/metrics", headers=bearer(READER)).status_code == 200, broken
    served.path.unlink()
    served.access.file.poll()
    assert served.get("/metrics", headers=bearer(READER)).status_code == 200
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4 and all("what was read before counts" in line for line in messages)
    assert newer not in caplog.text and "short" not in caplog.text


def test_a_change_is_found_while_the_server_runs(served, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 0.01)
    newer = "newer-0123456789abcdef"
    replaced(served.path, FILE.replace(BIDDER, newer))
    while served.post("/v1/act", json={}, headers=bearer(newer)).status_code == 401:
        pass
    assert served.post("/v1/act", json={}, headers=bearer(BIDDER)).status_code == 401


def test_a_file_written_twice_within_one_time_stamp_is_read_again(tmp_path):
    path, taken = tmp_path / "file", []
    path.write_text("a", encoding="utf-8")
    watched = WatchedFile(path, taken.append)
    watched.read()
    stamp = path.stat()
    path.write_text("b", encoding="utf-8")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    watched.poll()
    for settled in (0, 2**32):  # also before the clock of the system went back
        os.utime(path, (settled, settled))
        watched.poll()
        watched.poll()
    assert taken == [b"a", b"b", b"b", b"b"], "an old file is read once"


def test_a_token_beyond_its_rate_waits(tmp_path):
    limited = FILE.replace('rights = ["bid"]', 'rights = ["bid"]\nrate = 0.01\nburst = 6')
    path = written(tmp_path / "tokens.toml", limited)
    access = TokenAccess(None, path)
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, access=access)) as client:
        client.headers.update(bearer(BIDDER))
        ids = [client.post("/v1/campaigns", json=settings_of(i)).json()["id"] for i in range(2)]
        many = {"ticks": {ids[0]: drawn(0, 0), ids[1]: drawn(1, 0)}}
        assert client.post("/v1/ticks", json=many).status_code == 200, "two of four that are left"
        codes = [client.post("/v1/campaigns", json=settings_of(2)).status_code for _ in range(3)]
        assert codes == [201, 201, 429]
        late = client.post("/v1/campaigns", json=settings_of(3))
        assert 1 <= int(late.headers["retry-after"]) <= 100
        assert "at most 0.01 requests a second" in late.json()["detail"][0]["msg"]
        assert client.get("/metrics", headers=bearer(OPERATOR)).status_code == 200
        os.utime(path, (0, 0))
        access.file.poll()
        assert client.post("/v1/campaigns", json=settings_of(4)).status_code == 429, "read again"


def test_a_bucket_fills_at_its_rate():
    now = [0.0]
    bucket = TokenBucket(2.0, 3.0, clock=lambda: now[0])
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]
    now[0] = 0.5
    assert [bucket.take(), bucket.take()] == [0, 0.5]
    bucket.charge(4)
    assert bucket.take() == 2.5
    now[0] = 100.0
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5], "no more than the burst"


WRONG = {
    "x = 1": "expected a table [x]",
    "[x]": "x: rights: expected some of bid, operate, read",
    '[x]\nrights = ["fly"]': "x: rights: expected some of",
    '[x]\nrights = ["bid"]': "x: expected either token or sha256",
    '[x]\nrights = ["bid"]\ntoken = 1': "x: token: expected 16 to 256 bytes",
    '[x]\nrights = ["bid"]\nsha256 = "ab"': "x: sha256: expected 64 hexadecimal digits",
    '[x]\nrights = ["bid"]\nright = 1': "x: expected token, sha256, rights, rate, burst, got 'right'",
    '["a b"]\nrights = ["bid"]': "expected names of letters",
    f'[x]\ntoken = "{BIDDER}"\nrights = ["bid"]\nrate = 0': "x: rate: expected a number above 0",
    f'[x]\ntoken = "{BIDDER}"\nrights = ["bid"]\nrate = nan': "x: rate: expected a number above",
    f'[x]\ntoken = "{BIDDER}"\nrights = ["bid"]\nburst = 0.5': "x: burst: expected a number above 1",
    FILE + f'[again]\ntoken = "{READER}"\nrights = ["bid"]': "got one of them twice",
    FILE + "[bidder]": "expected TOML",
    "\xff": "expected TOML",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_refused_without_a_token_in_the_message(text):
    with pytest.raises(ValueError) as refused:
        parse_tokens(text.encode("latin-1"))
    assert WRONG[text] in str(refused.value)
    assert BIDDER not in str(refused.value) and READER not in str(refused.value)


def test_a_file_that_is_missing_stops_the_start(tmp_path):
    with pytest.raises(ValueError, match="tokens: expected a file to read"):
        TokenAccess(None, tmp_path / "none")


on_posix = pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")


@on_posix
@pytest.mark.parametrize("mode", [0o602, 0o620, 0o664, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path, mode):
    path = written(tmp_path / "tokens.toml", mode=mode)
    with pytest.raises(ValueError, match=f"tokens: .* got mode {mode:04o} of .*; chmod 600 {path}"):
        TokenAccess(None, path)
    path.chmod(0o600)
    assert TokenAccess(None, path).tokens.find(BIDDER.encode()).name == "bidder"


@on_posix
@pytest.mark.parametrize("linked", [False, True], ids=["a file", "a link"])
def test_a_file_in_a_folder_that_everybody_may_write_is_refused(tmp_path, linked):
    folder = tmp_path / "open"
    folder.mkdir()
    path = folder / "tokens.toml"
    if linked:
        path.symlink_to(written(tmp_path / "elsewhere"))
    else:
        written(path)
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=f"tokens: .* got mode 0777 of {folder}; chmod o-w"):
        TokenAccess(None, path)
    for mode in (0o1777, 0o755):  # the sticky bit, as /tmp has it
        folder.chmod(mode)
        assert TokenAccess(None, path).tokens.find(BIDDER.encode())


@on_posix
def test_a_change_of_permissions_is_seen_while_the_server_runs(tmp_path, caplog):
    path = written(tmp_path / "tokens.toml")
    os.utime(path, (0, 0))
    access = TokenAccess(None, path)
    newer = "newer-0123456789abcdef"
    written(path, FILE.replace(BIDDER, newer), mode=0o666)
    os.utime(path, (1, 1))
    for _ in range(2):
        access.file.poll()
    assert access.tokens.find(BIDDER.encode()) and not access.tokens.find(newer.encode())
    (message,) = caplog.messages
    assert "what was read before counts" in message and "chmod 600" in message
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    access.file.poll()
    assert access.tokens.find(BIDDER.encode())
    tmp_path.chmod(0o700)
    access.file.poll()
    assert access.tokens.find(newer.encode()) and not access.tokens.find(BIDDER.encode())


@on_posix
def test_tokens_that_everybody_may_read_are_named_once_and_digests_may_be_read(tmp_path, caplog):
    path = written(tmp_path / "tokens.toml", mode=0o644)
    access = TokenAccess(None, path)
    replaced(path, FILE)
    written(path, FILE + "#", mode=0o644)
    access.file.poll()
    (message,) = caplog.messages
    assert f"all users of this machine may read them; chmod 600 {path}" in message
    caplog.clear()
    digests = f'[reader]\nsha256 = "{sha256(READER.encode()).hexdigest()}"\nrights = ["read"]'
    TokenAccess(None, written(path, digests, mode=0o644))
    TokenAccess(None, written(path, mode=0o640))
    assert caplog.messages == []


@on_posix
def test_a_file_of_another_user_is_named_unless_that_is_root(tmp_path):
    path = written(tmp_path / "tokens.toml")
    mode, inode, device, links, _, *others = path.stat()

    def exposures(owner, user):
        status = os.stat_result([mode, inode, device, links, owner, *others])
        return list_exposures(path, status, user=user, is_plain=True)

    assert exposures(owner=1000, user=1000) == [] == exposures(owner=0, user=1000)
    (message,) = exposures(owner=1001, user=1000)
    assert "belongs to user 1001, who may change it" in message and f"chown 1000 {path}" in message


def test_a_long_word_is_refused_without_its_digest(monkeypatch):
    tokens = Tokens("the single one")
    tokens.load(FILE.encode())
    monkeypatch.setattr("decisionllm.bidding.server.tokens.sha256", None)
    assert tokens.find(b"x" * 60_000) is None


def test_the_log_names_the_token_of_a_request(served):
    with logs.write_logs("json", stream := io.StringIO()):
        served.get("/metrics", headers=bearer(READER))
        served.post("/v1/campaigns", json=settings_of(0), headers=bearer(READER))
        until(stream, 2)
    assert [(line["token"], line["status"]) for line in lines(stream)] == [
        ("reader", 200),
        ("reader", 403),
    ]
    assert READER not in stream.getvalue()
