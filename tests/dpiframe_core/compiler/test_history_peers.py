"""Layers of libraries over histories, within a model: RecBole's SASRec, the convolutions of CCPM, torch's decoder."""

import warnings

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_module
from tests.dpiframe_core.compiler.history_models import DIM, STEPS, Common, example, schema
from tests.dpiframe_core.compiler.modules import randomised
from tests.dpiframe_core.compiler.served import served
from tests.dpiframe_core.compiler.test_history_models import exact
from tests.dpiframe_core.compiler.test_peers import library

pytestmark = pytest.mark.bulk


class OfLayers(Common):
    def __init__(self, width, layers):
        super().__init__(width)
        self.layers = layers


class RecBole(OfLayers):
    """Mask, blocks and the last state as its SASRec has them."""

    def __init__(self):
        library("recbole")
        from recbole.model.layers import TransformerEncoder

        super().__init__(DIM, TransformerEncoder(2, 2, DIM, 32, hidden_act="gelu"))
        self.places, self.norm = nn.Embedding(STEPS, DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        ids = x["hist"]
        places = torch.arange(ids.size(1), dtype=torch.long, device=ids.device).unsqueeze(0).expand_as(ids)
        there = (ids != 0).unsqueeze(1).unsqueeze(2)
        mask = torch.where(torch.tril(there.expand((-1, -1, there.size(-1), -1))), 0.0, -10000.0)
        found = self.layers(self.norm(self.items(ids) + self.places(places)), mask, output_all_encoded_layers=True)[-1]
        last = ((ids != 0).sum(1) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, -1, found.shape[-1])
        return self.scored(x, found.gather(dim=1, index=last).squeeze(1))


class OfConvolutions(OfLayers):
    def forward(self, x):
        return self.scored(x, self.layers(self.items(x["hist"]).unsqueeze(1)).flatten(1))


def deepctr():
    library("deepctr_torch")
    from deepctr_torch.layers import ConvLayer

    layer = ConvLayer(field_size=STEPS, conv_kernel_width=(5, 3), conv_filters=(4, 4), device="cpu")
    return OfConvolutions(layer.filed_shape * 4 * DIM, layer)


def fuxictr():
    library("fuxictr")
    from fuxictr.pytorch.layers import KMaxPooling

    layers = nn.ZeroPad2d((0, 0, 2, 2)), nn.Conv2d(1, 3, (5, 1)), KMaxPooling(2, dim=2), nn.Tanh()
    return OfConvolutions(3 * 2 * DIM, nn.Sequential(*layers))


class Decoder(OfLayers):
    def __init__(self):
        super().__init__(DIM, nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, 2, 32, batch_first=True), 1))

    def forward(self, x):
        history = self.items(x["hist"])
        causal = nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=history.dtype)
        return self.scored(x, self.layers(history, history, tgt_mask=causal)[:, -1])


@pytest.mark.parametrize("made", [RecBole, deepctr, fuxictr, Decoder], ids=lambda made: made.__name__)
def test_a_librarys_layers_score_as_they_did(made, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        module = randomised(made(), seed=2)
    compile_module(module, schema(), example(23)).write(tmp_path / "b", name="layers")
    with served(tmp_path / "b") as scores:
        for rows in (1, 19):
            got, want = scores(example(rows, seed=rows)), exact(module, example(rows, seed=rows))
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert want.std() > 1e-3
