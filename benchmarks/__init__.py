"""Measurements: what a rewritten model costs beside the same model under torch.autocast."""
