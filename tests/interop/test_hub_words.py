"What the hub's refusals are explained as, which names may exist, and what is uploaded when."

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from trainkit.interop import hub


def refusal(*kinds, status=None):
    kind = Exception
    for name in reversed(kinds):
        kind = type(name, (kind,), {})
    error = kind("secret")
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    "error, offline, words",
    [
        (refusal("GatedRepoError", "RepositoryNotFoundError"), False, "'a/b' is gated"),
        (refusal("OfflineModeIsEnabled"), False, "and HF_HUB_OFFLINE forbids asking the hub"),
        (refusal("LocalEntryNotFoundError"), True, "and HF_HUB_OFFLINE forbids asking the hub"),
        (refusal("LocalTokenNotFoundError"), False, "the hub wants to know who asks"),
        (refusal("HfHubHTTPError", status=401), False, "the hub wants to know who asks"),
        (refusal("RepositoryNotFoundError", status=401), False, "the hub wants to know who asks"),
        (refusal("RepositoryNotFoundError"), False, "the hub has no 'a/b', or not for you"),
        (refusal("HfHubHTTPError", status=404), False, "the hub has no 'a/b', or not for you"),
        (refusal("HfHubHTTPError", status=403), False, "may not write to 'a/b'"),
        (refusal("ConnectionError"), False, "the hub cannot be reached for 'a/b'"),
        (
            refusal("HfHubHTTPError", status=500),
            False,
            "the hub refused 'a/b' (HfHubHTTPError, status 500)",
        ),
        (refusal("Strange"), True, "the hub refused 'a/b' (Strange)"),
    ],
)
def test_why_the_hub_refused(error, offline, words, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    text = hub.explain(error, "a/b")
    assert words in text and "secret" not in text


@pytest.mark.parametrize(
    "name, possible",
    [("owner/name", True), ("na.me_1-b", True), ("a/b/c", False), ("a--b", False), ("a..b", False)]
    + [("", False), ("a b", False), ("/a", False)],
)
def test_the_names_that_a_repository_may_have(name, possible, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    error = (OSError, "needs a token") if possible else (ValueError, "must be owner/name")
    with pytest.raises(error[0], match=error[1]):
        hub.open_repo(name)


@pytest.mark.parametrize(
    "kind, strategy, shards, adapter, pushed",
    [
        ("final", "end", None, False, [("model", "")]),
        ("final", "end", None, True, [("model", ""), ("adapter", "adapter")]),
        ("final", "checkpoint", object(), False, [("model", "")]),
        ("checkpoint", "end", None, True, []),
        ("checkpoint", "every_save", None, True, [("model", "")]),
        ("checkpoint", "every_save", object(), False, []),
        (
            *("checkpoint", "checkpoint", None, False),
            [("model", ""), ("step-3", "last-checkpoint")],
        ),
        ("checkpoint", "checkpoint", object(), False, [("step-3", "last-checkpoint")]),
        ("best", "checkpoint", None, False, []),
    ],
)
def test_what_is_uploaded_when(kind, strategy, shards, adapter, pushed, tmp_path):
    (tmp_path / "adapter").mkdir()
    done = []
    uploads = SimpleNamespace(
        adapter=adapter,
        config=SimpleNamespace(hub_strategy=strategy),
        push=lambda path, message, place="": done.append((Path(path).name, place)),
    )
    trainer = SimpleNamespace(shards=shards, model=None, write_model=lambda model, path: None)
    path = tmp_path / ("model" if kind == "final" else "step-3")
    hub.HubPush.on_save(uploads, trainer, dict(path=str(path), step=3, kind=kind))
    assert done == pushed
