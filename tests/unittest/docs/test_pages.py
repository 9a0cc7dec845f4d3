"""The code of the pages runs as it stands, and does what they say."""

import itertools

import pytest
import torch

from attention_backend import AttentionBackendError


def test_the_backend_of_the_page_passes_the_pages_own_tests(run_page, make_case, check):
    page = run_page("docs/add_a_backend.md")
    page["test_equals_the_dense_oracle"](make_case, check)
    page["test_what_it_cannot_do_is_refused_with_every_reason"]()


def test_the_backend_of_the_page_keeps_the_contract_in_every_form(run_page, make_case, check):
    run_page("docs/add_a_backend.md")
    forms = ["padded", "packed", "packed_q"]
    for form, causal, host_lens in itertools.product(forms, [False, True], [True, False]):
        for q_lens, kv_lens in (([3, 3, 3], [0, 9, 1]), ([1, 1], [4, 4])):
            case = make_case(form, q_lens, kv_lens, host_lens=host_lens)
            check(case, causal=causal, scale=0.3, backend=case.backend(name="einsum", scale=0.3))
    for form in ("paged", "extent"):
        case = make_case(form, [3, 3], [4, 5])
        backend = case.backend(name="einsum")
        with pytest.raises(AttentionBackendError, match="einsum cannot read"):
            backend.forward(case.q, case.k, case.v, case.metadata)


@torch.inference_mode()
def test_the_model_of_the_page_gives_what_padded_text_gives_row_by_row(run_page):
    page = run_page("docs/add_a_model.md")
    model, encoded = page["model"], page["encoded"]
    assert encoded.text_lens[0] != encoded.text_lens[1] and max(encoded.text_lens) < encoded.hidden.shape[1]
    text = model.project_text(encoded.hidden, encoded.text_lens)
    assert {kv.formulation for kv in text} == {"merge"}

    latents, timestep = torch.randn(2, 8, 2, 3, 3), torch.tensor([900.0, 900.0])
    both = model(latents, timestep, text)
    for row in range(2):  # alone, the zero rows past the text taken as rows like others
        alone = model.project_text(encoded.hidden[[row]], [encoded.hidden.shape[1]])
        assert {kv.formulation for kv in alone} == {"padded"}
        torch.testing.assert_close(model(latents[[row]], timestep[[row]], alone), both[[row]], atol=1e-5, rtol=0)
