"""The head's passes as torch.compile makes them, which takes a C++ compiler here and most of a minute."""

import draws
import torch

from cairn.trainer.scoring.passes import IN_PLACE, compiled

VOCABULARY = 97


@draws.in_turn("compiled kernels", 0, 2)
def test_compiled_passes_compute_the_same_for_any_number_of_rows():
    """With one compilation of each, whatever the number of rows."""
    draw, fused, compilations = torch.Generator().manual_seed(0), compiled(), []
    for rows in (7, 12, 5, 2):
        logits = 5 * torch.randn(rows, VOCABULARY, generator=draw).bfloat16()
        wanted = torch.randint(VOCABULARY, (rows,), generator=draw)
        scale = torch.randn(rows, generator=draw)
        results = []
        for passes in (fused, IN_PLACE):
            normalisers, logprobs = passes.score(logits.clone(), wanted, 0.7)
            gradient = passes.differentiate(logits.clone(), normalisers, wanted, scale, 0.7, torch.float32)
            results.append((normalisers, logprobs, gradient))
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(compilations)) == 1
