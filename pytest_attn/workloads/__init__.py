"""The vocabulary: workloads, masks, options, inputs, the catalog. Knows no library and no kernel."""
