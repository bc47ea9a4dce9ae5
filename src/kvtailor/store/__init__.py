"""The room `store`: where encoded segments live."""
