"""A transformer block compiles whole, and prompts of other lengths do not compile it again."""

import pytest
import torch

from visual_gen.models.wan import WanConfig, WanTransformer

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16, ffn_dim=40,
    num_layers=3, rope_max_seq_len=16,
)  # fmt: skip


LENGTHS = ((3, 5), (16, 1), (7, 12))


@pytest.fixture
def compiled():
    """Makes a model whose blocks are compiled with fullgraph, and gives the list of graphs compiled so far."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def make(cross_kv):
        torch.manual_seed(0)
        model = WanTransformer(CONFIG, attention={"cross_kv": cross_kv}).requires_grad_(False)
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model, graphs

    yield make
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("cross_kv", ["padded", "packed", "packed_pad_exact"])
def test_one_graph_serves_all_layers_and_three_text_lengths(compiled, make_inputs, cross_kv):
    model, graphs = compiled(cross_kv)
    plain = WanTransformer(CONFIG, attention={"cross_kv": cross_kv}).requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    inputs = make_inputs(CONFIG, text_lens=(16, 16))
    text = inputs.pop("encoder_hidden_states")
    for lens in LENGTHS:
        out = model(**inputs, text_kv=model.project_text(text, lens, fixed_capacity=True))
        expected = plain(**inputs, text_kv=plain.project_text(text, lens))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert len(graphs) == 1


@torch.no_grad()
def test_compiled_blocks_give_the_eager_result_where_the_compiler_is_off(make_inputs):
    model = WanTransformer(CONFIG).requires_grad_(False)
    inputs = make_inputs(CONFIG, text_lens=(16, 16))
    expected = model(**inputs)
    model.compile_blocks()
    assert model.blocks_compiled
    with torch.compiler.set_stance("force_eager"):
        out = model(**inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
