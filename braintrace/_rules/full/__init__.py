"""Rules that read the flattened state of a sample: RTRL, SnAp-n, UORO, KF-RTRL, no traces."""
