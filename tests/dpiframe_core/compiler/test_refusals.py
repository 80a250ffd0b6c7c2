"""What cannot be taken over is refused by the call's name and its line of source; nothing mixes rows in silence."""

import re

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_model
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table
from tests.dpiframe_core.compiler.modules import (
    Embeddings,
    Mixed,
    bag,
    called,
    categorical,
    example,
    mixed_schema,
    randomised,
    schema,
)

pytestmark = pytest.mark.bulk

ROW = "expected each row to be computed from itself"
BY_VALUES = "got an index that depends on values of the batch, expected x[torch.arange(n), i], gather, or constant positions"
MANY_ROWS = "got a choice among 65537 rows by values of the batch, expected at most 65536"
MANY_ROWS += " (make the position an id: a feature of its own)"
BY_ROWS = f"got an operation along the batch, {ROW}"


class Model(nn.Module):
    """Embeddings f[rows, 16], a final layer, and whatever a test makes of them in `forward`."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.out = Embeddings(4), nn.Linear(16, 1)
        self.batch_statistics = nn.BatchNorm1d(16, track_running_stats=False)
        self.register_buffer("seen", torch.zeros(1))
        self.more = nn.Embedding(50, 3)

    def fields(self, x):
        return self.embeddings(x).flatten(1)


# fmt: off
class Branch(Model):
    def forward(self, x):
        f = self.fields(x)
        if f.sum() > 0:
            f = f * 2
        return self.out(f).sigmoid()

class RunningMaximum(Model):
    def forward(self, x): return self.out(self.fields(x).cummax(1)[0]).sigmoid()

class BatchSoftmax(Model):
    def forward(self, x): return self.out(self.fields(x).softmax(0)).sigmoid()

class BatchMean(Model):
    def forward(self, x): return self.out(self.fields(x) - self.fields(x).mean(0)).sigmoid()

class BatchTotal(Model):
    def forward(self, x): return (self.out(self.fields(x)) / self.fields(x).sum()).sigmoid()

class BatchCumsum(Model):
    def forward(self, x): return self.out(self.fields(x).cumsum(0)).sigmoid()

class BatchStatistics(Model):
    def forward(self, x): return self.out(self.batch_statistics(self.fields(x))).sigmoid()

class Gram(Model):
    def forward(self, x): return (self.fields(x) @ self.fields(x).t()).sum(1).sigmoid()

class Broadcast(Model):
    def forward(self, x): return (self.out(self.fields(x)) + self.fields(x).sum(1)).sigmoid()

class FirstRow(Model):
    def forward(self, x): return self.out(self.fields(x) * self.fields(x)[0]).sigmoid()

class FirstRows(Model):
    def forward(self, x): return self.out(self.fields(x) * self.fields(x)[:1]).sigmoid()

class Turned(Model):
    def forward(self, x): return self.out(self.fields(x).view(-1).view(16, -1).t()).sigmoid()

class Einsum(Model):
    def forward(self, x): return self.out(torch.einsum("bi,ci->bi", self.fields(x), self.fields(x))).sigmoid()

class Positions(Model):
    def forward(self, x): return (self.out(self.fields(x)) * torch.arange(x["user"].shape[0]).unsqueeze(1)).sigmoid()

class Distant(Model):
    def forward(self, x): return self.out(self.fields(x)[self.fields(x)[:, 0].long().clamp(0, 1)]).sigmoid()

class Grid(Model):
    def forward(self, x):
        f = self.embeddings(x)
        i = f[:, 0, 0].long().clamp(0, 1)
        return (self.out(self.fields(x)) + f[torch.arange(f.shape[0]), i, i].unsqueeze(1)).sigmoid()

class Others(Model):
    def forward(self, x):
        f = self.fields(x)
        return self.out(f.gather(0, f.long().clamp(0, 1))).sigmoid()

class SameForAll(Model):
    def forward(self, x):
        f = self.fields(x)
        return self.out(f.gather(0, torch.tensor([[0]]).expand(f.shape[0], f.shape[1]))).sigmoid()

class LargeTable(Model):
    def forward(self, x):
        return (self.out(self.fields(x)) + torch.zeros(65537)[self.fields(x)[:, :1].long()]).sigmoid()

class RowCount(Model):
    def forward(self, x): return (self.out(self.fields(x)) * x["user"].shape[0]).sigmoid()

class Length(Model):
    def forward(self, x): return (self.out(self.fields(x)) / len(x["user"])).sigmoid()

class Filtered(Model):
    def forward(self, x): return self.out(self.fields(x)[self.fields(x).sum(1) > 0]).sigmoid()

class Mutation(Model):
    def forward(self, x):
        self.seen += 1
        return self.out(self.fields(x)).sigmoid()

class Renormed(Model):
    def forward(self, x):
        self.more.max_norm = 1.0
        return (self.out(self.fields(x)) + self.more(x["user"]).sum(1, keepdim=True)).sigmoid()

class Cropped(Model):
    def forward(self, x): return self.out(nn.functional.pad(self.fields(x), (-1, 1))).sigmoid()

class Noise(Model):
    def forward(self, x): return self.out(self.fields(x) + torch.rand_like(self.fields(x))).sigmoid()

class Dropout(Model):
    def forward(self, x): return self.out(nn.functional.dropout(self.fields(x), 0.5, training=True)).sigmoid()

class IdsAsNumbers(Model):
    def forward(self, x): return (self.out(self.fields(x)) * x["user"].float().unsqueeze(1)).sigmoid()

class Half(Model):
    def forward(self, x): return self.out(self.fields(x).half().float()).sigmoid()

class Infinite(Model):
    def forward(self, x): return self.out(self.fields(x) * torch.full((16,), torch.inf)).sigmoid()

class SecondTable(Model):
    def forward(self, x): return (self.out(self.fields(x)) + self.more(x["user"]).sum(1, keepdim=True)).sigmoid()

class Numpy(Model):
    def forward(self, x): return self.out(torch.tensor(self.fields(x).numpy())).sigmoid()

class Wide(Model):
    def forward(self, x): return self.out(self.fields(x)).sigmoid(), self.fields(x)
# fmt: on

EXPECTED = {
    Branch: (
        "`if f.sum() > 0:`", "got a branch that depends on values of the batch, expected the same operations for every batch"
    ),
    RunningMaximum: ("cummax", "got aten.cummax.default, expected an operation that docs/compile.md lists"),
    BatchSoftmax: ("softmax", BY_ROWS),
    BatchMean: ("mean", BY_ROWS),
    BatchTotal: ("sum_1", BY_ROWS),
    BatchCumsum: ("cumsum", BY_ROWS),
    BatchStatistics: (
        "batch_norm", "got batch norm by the statistics of the batch, expected those kept in training"
    ),
    Gram: ("matmul", f"got operands with the batch in different dimensions, {ROW}"),
    Broadcast: (r"add(_\d+)?", f"got operands with the batch in different dimensions, {ROW}"),
    FirstRow: ("select", f"got a choice among the rows of the batch, {ROW}"),
    FirstRows: (r"slice_\d", f"got a slice of the batch, {ROW}"),
    Turned: (r"view(_\d+)?", f"got a view that cuts the batch, {ROW}"),
    Einsum: ("einsum", "got einsum 'bi,ci->bi', expected one letter for the batch, in the result and in no constant"),
    Positions: (r"mul(_\d+)?", f"got aten.mul.Tensor of the numbers of the rows, {ROW}"),
    Distant: ("index", BY_VALUES),
    Grid: ("index", "got an index of rows and several others, expected x[torch.arange(n), i] with one position a row"),
    Others: ("gather", BY_ROWS),
    SameForAll: ("gather", "got gather by constant positions, expected the same [1, ..] for all rows, not along them"),
    LargeTable: ("index", MANY_ROWS),
    RowCount: (r"mul(_\d+)?", "got the number of rows as a number, expected one that is known before there is a batch"),
    Cropped: ("pad", "got padding by [-1, 1], expected 0 or more (a slice takes columns away)"),
    Filtered: ("index", BY_VALUES),
    Noise: ("rand_like", "got aten.rand_like.default, expected nothing random"),
    Dropout: ("dropout", "got aten.dropout.default, expected nothing random"),
    IdsAsNumbers: (r"mul(_\d+)?", "got the ids of feature 'user' as numbers, expected them in an embedding lookup alone"),
    Half: ("to", "got a cast to torch.float16, expected float32 values throughout"),
    Infinite: (
        r"mul(_\d+)?",
        "got a constant with NaN or infinite values, expected finite ones (a mask: masked_fill)",
    ),
    SecondTable: (
        r"embedding_\d",
        "got 4 of embeddings.tables.user.weight + 3 of more.weight for table 'user', expected 4 columns as the schema says",
    ),
}  # fmt: skip
UNCHANGED = "nothing that the module changes (an embedding with max_norm: scale its rows, then set max_norm to None)"
WITHOUT_LINE = {
    Mutation: f"module: got ['seen'], expected {UNCHANGED}",
    Renormed: f"module: got ['more.weight'], expected {UNCHANGED}",
    Wide: "module output: got '2 values', expected `output`: one of [0, 1], or a list of one for each task",
}


def refusal(module, made=None, values=None, **options):
    made = made or schema(4)
    with pytest.raises(InputError) as error:
        compile_model(module, made, values or example(made), **options)
    return str(error.value)


class Flips(Model):
    """Another mask at every call."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("flip", torch.tensor([True, False, True, False]))

    def forward(self, x):
        fields = self.fields(x)
        made = self.out(fields * self.flip.repeat(fields.shape[1] // 4)).sigmoid()
        if self.how == "assigns":
            self.flip = ~self.flip
        elif self.how == "in place":
            self.flip.logical_not_()
        else:
            self.flip[0] = False
        return made


@pytest.mark.parametrize("how", ["assigns", "in place", "an item"])
def test_a_mask_that_a_module_changes_is_refused_and_stays_its_buffer(how):
    module = randomised(Flips(how))
    was = module.flip.clone()
    assert re.match(
        r"module: got .*(flip|a buffer that).*, expected (nothing that the module changes|one that stays)", refusal(module)
    )
    assert "flip" in dict(module.named_buffers())
    if how != "assigns":  # to say what is wrong it is called once
        assert torch.equal(module.flip, was)


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_a_call_that_cannot_be_taken_over_is_refused_by_name_and_line(kind):
    name, text = EXPECTED[kind]
    message = refusal(randomised(kind()))
    where, rest = message.split(": got ", 1)
    assert f"got {rest}" == text
    if name.startswith("`"):
        assert re.fullmatch(rf"module: test_refusals\.py:\d+, {re.escape(name)}", where)
    else:
        assert re.fullmatch(rf"module: {name} \(test_refusals\.py:\d+, `.*`\)", where)


@pytest.mark.parametrize("kind", WITHOUT_LINE, ids=lambda kind: kind.__name__)
def test_what_has_no_line_is_refused_as_a_whole(kind):
    assert refusal(randomised(kind())) == WITHOUT_LINE[kind]


def test_code_that_export_cannot_follow_is_refused_with_its_line():
    assert re.fullmatch(
        r"module: test_refusals\.py:\d+, `def forward.*numpy.*`: got .*numpy.*, expected a module that torch\.export takes",
        refusal(randomised(Numpy())),
    )


def test_the_line_of_a_refusal_is_the_users_own():
    message = refusal(randomised(RunningMaximum()))
    line = int(re.search(r"test_refusals\.py:(\d+)", message)[1])
    with open(__file__) as file:
        assert "cummax(1)" in file.read().splitlines()[line - 1]


def test_a_number_of_rows_that_is_fixed_is_refused_with_the_line_that_fixes_it():
    want = r"module: test_refusals\.py:\d+, `.*len\(.*`: got a fixed number of rows, expected any number: x\.shape\[0\] for len"
    assert re.match(want, refusal(Length()))


def test_a_module_of_another_dtype_is_refused():
    message = refusal(randomised(RunningMaximum()).double())
    assert message == "module.embeddings.tables.user.weight: got 'torch.float64 on cpu', expected float32 on the CPU"


class HiddenMixing(nn.Module):
    """Rows meet in Python, which a trace cannot see: by the number of rows alone."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, x):
        logit = self.inner.out(self.inner.fields(x))
        if not torch.compiler.is_exporting():
            logit = logit - logit.mean()
        return logit.sigmoid()


def test_a_module_whose_scores_depend_on_the_other_rows_is_refused():
    message = refusal(randomised(HiddenMixing()))
    assert re.fullmatch(r"compiled scores: got [\d.e-]+, expected at most 1e-05 between them and the module's own", message)


def test_scores_that_are_no_probabilities_are_refused():
    class Logits(Model):
        def forward(self, x):
            return self.out(self.fields(x)) - 100

    message = refusal(randomised(Logits()))
    assert re.fullmatch(
        r"module output: got -[\d.]+, expected probabilities from 0 to 1: a forward that ends in a sigmoid, or logits=True .*",
        message,
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.pop("user"), "example: got no user, expected exactly the features of the schema"),
        (lambda v: v.update(x=v["user"]), "example: got x beside the features, expected exactly the features of the schema"),
        (lambda v: v.update(user=v["user"].numpy()), "example.user: got ndarray, expected a torch.Tensor"),
        (lambda v: v.update(user=v["user"][:5]),
         "example: got '[5, 23] rows', expected 2 rows or more, as many of each feature"),
        (lambda v: v.update(user=v["user"].float()),
         "example.user: got 'torch.float32', expected integers, as its feature has ids"),
        (lambda v: v.update(user=v["user"].repeat(2, 1).t()), "example.user: got (23, 2), expected [rows]"),
        (lambda v: v.update(user=torch.full((23,), 50)), "example.user: got 50, expected ids from 0 to 49"),
    ],
)  # fmt: skip
def test_an_example_that_does_not_fit_the_schema_is_refused(change, text):
    class Plain(Model):
        def forward(self, x):
            return self.out(self.fields(x)).sigmoid()

    values = example(schema(4))
    change(values)
    assert refusal(randomised(Plain()), values=values) == text


def test_a_schema_of_other_tables_is_refused_with_what_the_module_has():
    class Plain(Model):
        def forward(self, x):
            return self.out(self.fields(x)).sigmoid()

    made = schema(4)
    more = FeatureSchema(features=made.features, tables=(Table(name="user", rows=60, dim=4), *made.tables[1:]))
    assert refusal(randomised(Plain()), more, example(made)) == (
        "tables.user.rows: got 60, expected 50, the rows of embeddings.tables.user.weight"
    )
    wide = FeatureSchema(features=made.features, tables=(Table(name="user", rows=50, dim=6), *made.tables[1:]))
    assert refusal(randomised(Plain()), wide, example(made)) == (
        "tables.user.dim: got 6, expected 4: 4 of embeddings.tables.user.weight"
    )
    unread = FeatureSchema(features=(*made.features, Numeric(name="age")), tables=made.tables)
    assert refusal(randomised(Plain()), unread, example(unread)) == (
        "module: got no lookup of age, expected each feature to be read: leave out those that the module is not for"
    )


def test_features_of_several_values_must_be_pooled_as_the_schema_says():
    module, made = randomised(Mixed(), seed=1), mixed_schema()
    values = example(made)
    assert called(module, values, {"call": "keywords"}).shape == (23, 2)
    features = [f if f.name != "seen" else f.model_copy(update={"pooling": "sum"}) for f in made.features]
    other = FeatureSchema(features=tuple(features), tables=made.tables)
    assert refusal(module, other, values, call="keywords").endswith(
        "got pooling 'mean' of feature 'seen', expected 'sum' as the schema says"
    )
    listed = [f if f.name != "words" else f.model_copy(update={"pooling": "mean"}) for f in made.features]
    said = refusal(module, FeatureSchema(features=tuple(listed), tables=made.tables), values, call="keywords")
    assert said.endswith(
        "got an nn.Embedding of feature 'words', whose schema pools by 'mean', expected nn.EmbeddingBag(.., mode='mean'); "
        "pooling 'none' in the schema leaves the values to the module"
    )
    with torch.no_grad():
        module.words.weight[0] = 1
    assert refusal(module, made, values, call="keywords").endswith(
        "got a row of words.weight at padding_idx 0 that is not zero, expected zeros: absent values add nothing"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"padding_value": None}, "got padding_value None and missing_id -1 of feature 'seen', expected 2 and -1: what the"),
        ({"padding_value": 1}, "got padding_value 1 and missing_id -1 of feature 'seen', expected 2 and -1: what the module"),
        ({"missing_id": 2}, "got padding_value 2 and missing_id 2 of feature 'seen', expected 2 and -1: what the module"),
        ({"encoder": Identity(out_of_range="oov"), "oov_id": 2}, "got padding_idx 2, an id that the encoder of feature 'seen'"),
        (
            {"encoder": Hash(buckets=11, first_id=2)},
            "got padding_idx 2, an id that the encoder of feature 'seen' gives to values, expected another",
        ),
    ],
)
def test_what_a_mean_leaves_out_must_be_absent_in_requests_too(change, text):
    made = mixed_schema()
    features = [f if f.name != "seen" else f.model_copy(update=change) for f in made.features]
    other = FeatureSchema(features=tuple(features), tables=made.tables)
    assert text in refusal(randomised(Mixed(), seed=1), other, example(made), call="keywords")


def test_what_a_sum_leaves_out_may_be_a_value_only_if_its_row_is_zero():
    class Summed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.EmbeddingBag(11, 4, mode="sum", padding_idx=0), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.words(x["words"])).sigmoid()

    made = FeatureSchema(features=(bag("words", "words", 3),), tables=(Table(name="words", rows=11, dim=4),))
    module = randomised(Summed())
    assert "got padding_value None and missing_id -1 of feature 'words', expected 0 and -1" in refusal(module, made)
    with torch.no_grad():
        module.words.weight[0] = 0
    assert compile_model(module, made, example(made)).deviation <= 1e-5


def test_the_largest_of_features_of_one_value_each_is_refused_in_words():
    class Largest(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.EmbeddingBag(11, 4, mode="max"), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.table(torch.stack([x["user"], x["item"]], 1))).sigmoid()

    features = tuple(categorical(n, "items") for n in ("user", "item"))
    made = FeatureSchema(features=features, tables=(Table(name="items", rows=11, dim=4),))
    assert "got pooling 'max' of features of one value, expected sum or mean, or one" in refusal(randomised(Largest()), made)


class Misspelt(Model):
    def forward(self, x):
        return self.more(x["usr"])


class Unequal(Model):
    def forward(self, x):
        return self.out(self.fields(x)[:, :5])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Misspelt, r"`return self.more\(x\[\"usr\"\]\)`: got a forward that asks for 'usr', expected one of the features, "),
        (Unequal, r"`return self.out.*`: got RuntimeError: .*shapes.*, expected a forward that runs on the example"),
        (Branch, r"a branch that depends on values of the batch"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_module_that_does_not_run_says_so_alone(capfd, kind, said):
    made = schema(4)
    with pytest.raises(InputError, match=said):
        compile_model(kind(), made, example(made))
    assert capfd.readouterr() == ("", "")


class Several(Model):
    def forward(self, x):
        a, b = self.out(self.fields(x)).sigmoid(), self.out(self.fields(x) * 2).sigmoid()
        return {"a": a, "b": b, "loss": a.mean()}


class NoNumber(Model):
    def forward(self, x):
        return (self.out(self.fields(x)) - 100).log().sigmoid()


class OneScore(Model):
    def forward(self, x):
        return self.out(self.fields(x)).sigmoid()


class Scaled(Model):
    """A number times a vector, by hand."""

    def __init__(self):
        super().__init__()
        self.price = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.out(self.fields(x) + (x["price"][:, None] * self.price).repeat(1, 4)).sigmoid()


@pytest.mark.parametrize(
    ("module", "output", "message"),
    [
        (Several, ["a", "zz"], "output: got 'zz', expected one of ['a', 'b', 'loss']"),
        (Several, "c", "output: got 'c', expected one of ['a', 'b', 'loss']"),
        (Several, ["a", "loss"], "module output 'loss': got 'one number for all rows', expected one tensor of scores; "),
        (OneScore, 3, "output: got 3, expected none: the module gives one value"),
        (NoNumber, None, "module output: got NaN on the example, expected a forward that is finite there"),
    ],
)
def test_scores_that_are_none_are_refused(module, output, message):
    made = schema(4)
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        compile_model(randomised(module()), made, example(made), output=output)


def test_a_number_with_a_table_that_no_embedding_reads_is_told_what_would():
    features = (*schema(4).features, Numeric(name="price", table="price"))
    made = FeatureSchema(features=features, tables=(*schema(4).tables, Table(name="price", rows=1, dim=4)))
    message = r"^tables\.price: got no embedding that reads it, expected one \(of a number: nn\.Linear\(1, dim, bias=False\)\)"
    with pytest.raises(InputError, match=message):
        compile_model(randomised(Scaled()), made, example(made))


class Codes(Model):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(8, 16))

    def forward(self, x):
        return torch.cdist(self.fields(x), self.codes).sum(1, keepdim=True).sigmoid()


def test_distances_to_constants_by_torchs_own_choice_are_refused_with_the_other_way():
    """torch multiplies from 26 vectors on."""
    made = schema(4)
    message = r"hold for some numbers of rows alone, from 26 on, expected any number: .*cdist\(.., compute_mode='donot_use_mm"
    with pytest.raises(InputError, match=message):
        compile_model(randomised(Codes()), made, example(made, rows=40))


class Padded(nn.Module):
    """torch's encoder, told of padded steps, whose every step is read; or those that are there alone."""

    def __init__(self, reads_all=True, **options):
        super().__init__()
        self.table, self.out = nn.Embedding(60, 8, padding_idx=0), nn.Linear(6 * 8, 1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.reads_all = nn.TransformerEncoder(layer, 1, **options), reads_all

    def forward(self, x):
        absent = x["seen"] == 0
        found = self.encoder(self.table(x["seen"]), src_key_padding_mask=absent)
        return self.out((found if self.reads_all else found.masked_fill(absent[:, :, None], 0)).flatten(1)).sigmoid()


PADDED = "module: got a TransformerEncoder that answers zeros for padded steps, in eval mode alone, expected"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("shortest", [1, 6], ids=["some are padded", "none is padded"])
def test_an_encoder_that_answers_zeros_for_padded_steps_is_refused_whatever_lists_the_example_has(shortest):
    seen = Categorical(
        name="seen",
        values="int",
        encoder=Identity(),
        table="items",
        max_values=6,
        pooling="none",
        missing_id=-1,
        padding_value=0,
    )
    made = FeatureSchema(features=(seen,), tables=(Table(name="items", rows=60, dim=8),))
    ids = torch.randint(1, 60, (12, 6)) * (torch.arange(6) < torch.randint(shortest, 7, (12, 1)))
    assert refusal(randomised(Padded()), made, {"seen": ids}).startswith(PADDED)
    for taken in (Padded(enable_nested_tensor=False), Padded(reads_all=False)):
        compiled = compile_model(randomised(taken), made, {"seen": ids})
        assert compiled.deviation <= 1e-5
        assert taken.encoder.use_nested_tensor is taken.encoder.enable_nested_tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"call": "Matrix"}, "call: got 'Matrix', expected one of mapping, keywords, matrix"),
        ({"module": lambda x: x}, "module: got function, expected a Module"),
        ({"schema": None}, "schema: got NoneType, expected a FeatureSchema"),
        ({"example": None}, "example: got NoneType, expected a Mapping"),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_what_is_no_argument_of_its_kind_is_refused(change, message):
    given = {"module": OneScore(), "schema": schema(4), "example": example(schema(4))} | change
    with pytest.raises(InputError) as error:
        compile_model(given.pop("module"), given.pop("schema"), given.pop("example"), **given)
    assert str(error.value).startswith(message)


def test_a_parameter_that_is_no_number_is_refused_by_name():
    module = OneScore()
    with torch.no_grad():
        module.out.bias[0] = torch.nan
    made = schema(4)
    with pytest.raises(InputError, match=r"got out.bias with NaN or infinite values, expected finite ones"):
        compile_model(module, made, example(made))
