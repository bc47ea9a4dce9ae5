"""Model + plans + tasks -> records -> tables: what each way of compressing costs, measured so that it cannot fool."""
