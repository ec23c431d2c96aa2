"""The compiled model as frozen data, read by all later packages."""
