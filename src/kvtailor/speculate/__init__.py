"""The stage `speculate`: a draft and a target -> tokens that are the target's own, several for each of its forwards."""
