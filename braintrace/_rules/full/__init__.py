"""Rules that read the whole state of a sample: RTRL, SnAp-n, UORO, KF-RTRL, no traces."""
