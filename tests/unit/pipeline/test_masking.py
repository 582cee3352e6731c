"""What a bug report must not tell: secrets known and unknown, names of people and machines, home folders."""

import pytest

from workbench.pipeline.masking import Mask


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "abcDEF123456ghiJKL",
        "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2",
        "sk-" + "proj-abcdef0123456789abcdef",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_123",
        "glpat-" + "abcdefghij0123456789",
    ],
)
def test_what_looks_like_a_token_is_masked_wherever_it_comes_from(secret: str) -> None:
    text = Mask()(f"failed for {secret}, again '{secret}'.")
    assert secret not in text and text.count("[secret]") == 2


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://anna:pa55word@host.org/simple", "https://[secret]@host.org/simple"),
        ("Authorization: Bearer abcdef.123456", "Authorization: Bearer [secret]"),
        ('"wandb_api_key": "0123456789abcdef"', '"wandb_api_key": "[secret]"'),
        ("s3://b/x?X-Amz-Signature=0a1b2c3d&part=2", "s3://b/x?X-Amz-Signature=[secret]&part=2"),
        ("password=tr0ub4dor and more", "password=[secret] and more"),
    ],
)
def test_what_stands_where_secrets_stand_is_masked(text: str, masked: str) -> None:
    assert Mask()(text) == masked


@pytest.mark.parametrize("text", ["num_tokens: 1704512", "pad_token: '<|endoftext|>'", "tokens/s 104101", "sk-learn"])
def test_words_of_this_trade_stay(text: str) -> None:
    assert Mask()(text) == text


def test_known_secrets_names_and_homes_go_and_their_lookalikes_stay() -> None:
    mask = Mask(secrets=["opensesame"], users=["anna"], hosts=["annas-laptop"], home="/srv/people/anna")
    assert mask("/srv/people/anna/runs on annas-laptop: opensesame") == "~/runs on [host]: [secret]"
    assert mask("/data/anna/x, ANNA, hannah, banana") == "/data/[user]/x, [user], hannah, banana"
    assert mask("/srv/people/annabel/x") == "/srv/people/annabel/x"


def test_homes_of_others_and_of_other_systems_are_masked() -> None:
    assert Mask()("/home/bob/a.py, /Users/carol/b.py") == "/home/[user]/a.py, /Users/[user]/b.py"
    assert Mask()(r"C:\Users\Dave\c.py") == r"C:\Users\[user]\c.py"
    assert Mask()(r'{"path": "C:\\Users\\Dave\\c.py"}') == r'{"path": "C:\\Users\\[user]\\c.py"}'
    assert Mask()("model/home/size 3") == "model/home/size 3"


def test_shared_accounts_and_short_values_do_not_riddle_the_text() -> None:
    mask = Mask(secrets=["true", "1"], users=["root", "jo"], hosts=["localhost"])
    assert mask("root 1 true jo localhost") == "root 1 true jo localhost"


def test_the_mask_of_this_machine_knows_variables_the_token_file_and_the_user(tmp_path, monkeypatch) -> None:
    home = tmp_path / "erika"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text("a-token-without-prefix\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    mask = Mask.of_this_machine({"MY_SERVICE_TOKEN": "zzz-999-zzz", "USER": "e.muster", "EDITOR": "nano-editor"})
    assert mask("a-token-without-prefix zzz-999-zzz") == "[secret] [secret]"
    assert mask(f"{home}/x by e.muster and erika, in nano-editor") == "~/x by [user] and [user], in nano-editor"
