"""Research on the sampler: studies, tasks, calibration, the evaluation harness."""
