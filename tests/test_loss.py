"""The loss of patched language models: stock's value and gradients, without fp32 logits, and on request without any."""

import pytest
import torch
import transformers
from families import CAUSAL, assert_gradients_close, assert_rows_close, make, mask_of, pair, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

import hf_flash
from hf_flash import loss

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Batches of these tests are several pieces and parts long, the last ones shorter."""
    monkeypatch.setattr(loss, "PIECE", 97 * 5)
    monkeypatch.setattr(loss, "PART", 97 * 8)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor made, by dtype."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.found[x.dtype] = max(self.found.get(x.dtype, 0), x.numel())
        return out


def batch(kind="right"):
    mask, ids = mask_of(kind), tokens()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("reduction", ["mean", "items", "shift_labels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_are_as_near_to_fp64_as_stock(dtype, reduction):
    logits = (4 * torch.randn(2, 33, 97)).to(dtype)
    labels = torch.randint(97, (2, 33)).masked_fill(torch.rand(2, 33) < 0.3, -100)
    options = {"items": {"num_items_in_batch": torch.tensor(77)}, "shift_labels": {"shift_labels": labels}}
    options = options.get(reduction, {})
    results = []
    for function, x in ((ForCausalLMLoss, logits), (loss.language_loss, logits), (None, logits.double())):
        x = x.clone().requires_grad_()
        if function is None:
            shifted = (x, labels) if "shift_labels" in options else (x[:, :-1], labels[:, 1:])
            kind = "sum" if reduction == "items" else "mean"
            value = torch.nn.functional.cross_entropy(shifted[0].flatten(0, 1), shifted[1].flatten(), reduction=kind)
            value = value / 77 if reduction == "items" else value
        else:
            value = function(x, labels, 97, **options)
        value.backward()
        results.append((value.detach().double(), x.grad.double()))
    stock, ours, exact = results
    for theirs, found, right in zip(stock, ours, exact):
        assert (found - right).abs().max() <= 2 * (theirs - right).abs().max() + 1e-6


@pytest.mark.parametrize("items", [None, 0, 3])
def test_labels_that_are_all_ignored_give_what_stock_gives(items):
    """A loss that is no number, and gradients that are: one batch without labels must not spoil the weights."""
    logits, labels = torch.randn(1, 4, 97, requires_grad=True), torch.full((1, 4), -100)
    found = loss.language_loss(logits, labels, 97, num_items_in_batch=items)
    torch.testing.assert_close(found, ForCausalLMLoss(logits, labels, 97, items), equal_nan=True)
    found.backward()
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize("keep_logits", [True, False])
def test_a_batch_without_labels_gives_no_gradient(keep_logits):
    model = hf_flash.patch_model(pair("llama")[1].train(), keep_logits=keep_logits)
    given = batch("full")
    given["labels"] = torch.full_like(given["labels"], -100)
    model(**given).loss.backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_labels_of_another_length_are_refused():
    """Also where pieces of the longer one could be dropped unseen."""
    rows = loss.PIECE // 97
    with pytest.raises(ValueError, match=f"labels are for {2 * rows} tokens, logits for {rows}"):
        loss.language_loss(torch.randn(1, rows, 97), torch.zeros(1, 2 * rows, dtype=torch.long), 97)


@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("kind", ["right", "full"])
@pytest.mark.parametrize("name", CAUSAL)
def test_training_equals_stock_with_logits_and_without(name, kind, keep_logits):
    stock, ours = (model.train() for model in pair(name))
    hf_flash.patch_model(ours, keep_logits=keep_logits)
    given = batch(kind)
    if kind == "right":  # stock lets padding predict these
        given["labels"][:, 0] = -100
    found, expected = ours(**given), stock(**given)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert type(found) is type(expected) and ("logits" in found) == keep_logits
    found.loss.backward()
    expected.loss.backward()
    assert_gradients_close(ours, stock)


LONG = {"input_ids": torch.arange(180).view(3, 60) % 97, "labels": torch.arange(180).view(3, 60) % 97}


def test_no_fp32_copy_of_the_logits_is_made():
    model = hf_flash.patch_model(make("llama").bfloat16()).train()
    with Largest() as largest:
        model(**LONG).loss.backward()
    assert largest.found[torch.bfloat16] == 180 * 97 and largest.found[torch.float32] < 180 * 97


def test_without_logits_no_tensor_has_their_size():
    model = hf_flash.patch_model(make("llama").bfloat16(), keep_logits=False).train()
    with Largest() as largest:
        model(**LONG).loss.backward()
    assert max(largest.found.values()) < 180 * 97


def test_a_trained_head_gathers_its_parts_as_exactly_as_stock():
    """Its gradient in bf16 is a sum over parts, each rounded."""
    given, errors = batch("full"), []
    exact = make("llama").bfloat16().double().train()
    exact(**given).loss.backward()
    for patched in (False, True):
        model = make("llama").bfloat16().train()
        if patched:
            hf_flash.patch_model(model, keep_logits=False)
        model(**given).loss.backward()
        errors.append((model.lm_head.weight.grad.double() - exact.lm_head.weight.grad).abs().max())
    assert errors[1] <= 2 * errors[0] + 1e-5


@pytest.mark.parametrize("case", ["eval", "no labels", "logits_to_keep", "no gradient"])
def test_logits_are_there_wherever_they_may_be_wanted(case):
    stock, ours = (model.train(case != "eval") for model in pair("llama"))
    hf_flash.patch_model(ours, keep_logits=False)
    given = batch("full")
    if case == "no labels":
        del given["labels"]
    if case == "logits_to_keep":
        given.update(logits_to_keep=5, labels=given["labels"][:, -5:])
    with torch.set_grad_enabled(case != "no gradient"):
        found, expected = ours(**given), stock(**given)
    assert_rows_close(found.logits, expected.logits, torch.ones(expected.logits.shape[:2]))
    if case != "no labels":
        torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)


def test_a_tuple_keeps_its_places_without_logits():
    stock, ours = (model.train() for model in pair("llama"))
    hf_flash.patch_model(ours, keep_logits=False)
    given = {**batch("full"), "return_dict": False}
    found, expected = ours(**given), stock(**given)
    assert len(found) == len(expected) and found[1] is None
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)


def test_an_adapter_on_the_head_is_part_of_the_loss_without_logits():
    peft = pytest.importorskip("peft")
    models = []
    for patched in (False, True):
        config = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        torch.manual_seed(2)
        model = peft.get_peft_model(make("llama"), config).train()
        models.append(hf_flash.patch_model(model, keep_logits=False) if patched else model)
        models[-1](**batch_of_seed(4)).loss.backward()
    assert_gradients_close(models[1], models[0])


def batch_of_seed(seed):
    ids = tokens(seed=seed)
    return {"input_ids": ids, "labels": ids}


def test_a_loss_of_the_users_own_stays_and_unpatching_gives_stock_back():
    model = make("llama")
    hf_flash.unpatch_model(hf_flash.patch_model(model))
    assert "_loss_function" not in model.__dict__ and model.loss_function is ForCausalLMLoss
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 42
    hf_flash.patch_model(model).train()
    assert model(**batch()).loss == 42
    with pytest.raises(ValueError, match="keep_logits=False"):
        hf_flash.patch_model(hf_flash.unpatch_model(model), keep_logits=False)


@pytest.mark.parametrize(("name", "head"), [("bert", None), ("llama", "AutoModel"),
                                            ("llama", "AutoModelForSequenceClassification")])  # fmt: skip
def test_models_without_a_causal_head_refuse_to_skip_logits_before_anything_changes(name, head):
    model = make(name, head)
    with pytest.raises(ValueError, match="causal language models"):
        hf_flash.patch_model(model, keep_logits=False)
    assert not hf_flash.report(model).patched


@pytest.mark.parametrize(("own", "reason"), [(False, "changes its logits"), (True, "has a loss of its own")])
def test_a_forward_that_uses_its_logits_itself_is_refused_without_logits(own, reason):
    class Other(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels):
            logits = 2 * self.lm_head(self.model(input_ids).last_hidden_state)
            return logits.sum() if own else self.loss_function(logits, labels, 97)

    Other.__name__ = "LlamaForCausalLM"
    model = hf_flash.patch_model(Other(make("llama").config), keep_logits=False).train()
    with pytest.raises(RuntimeError, match=reason):
        model(**batch_of_seed(1))
    assert model.lm_head.__dict__.get("forward") is None and model.loss_function is loss.language_loss
