"""One file a question; each has ``cases(platform) -> list of cases``."""
