"""The stage `store`: where encoded segments live."""
