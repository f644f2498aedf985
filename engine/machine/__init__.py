"""What an engine is put together from, for each kind of device: model, weight store, device and kernels."""
