"""What every token goes through: append, attend, observe; past the budget, score, allocate, select, merge, encode."""
