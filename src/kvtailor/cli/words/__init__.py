"""What several verbs print about a plan, its budget, its tiers and its calibration files."""
