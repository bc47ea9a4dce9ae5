"""What several verbs say of a plan, its budget, its tiers and its calibration files."""
