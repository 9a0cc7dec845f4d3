"""A transformer block compiles whole, and prompts of other lengths do not compile it again."""

import pytest
import torch

from visual_gen.models.wan import WanConfig, WanTransformer

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16, ffn_dim=40,
    num_layers=3, rope_max_seq_len=16,
)  # fmt: skip


@pytest.fixture
def compiled():
    """A model whose blocks are compiled with fullgraph, and the list of graphs compiled so far."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = WanTransformer(CONFIG).requires_grad_(False)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    yield model, graphs
    torch._dynamo.reset()


@torch.no_grad()
def test_one_graph_serves_all_layers_and_three_text_lengths(compiled, make_inputs):
    model, graphs = compiled
    plain = WanTransformer(CONFIG).requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    inputs = make_inputs(CONFIG, text_lens=(16, 16))
    for lens in ((3, 5), (16, 1), (7, 12)):
        torch.testing.assert_close(model(**inputs, text_lens=lens), plain(**inputs, text_lens=lens), rtol=0, atol=1e-6)
    assert len(graphs) == 1
