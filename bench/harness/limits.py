"""What `unisono bench collective` says of the machine."""


def share_of_limit(row):
    """Which share of the limit an operation has reached; None where the limit is not known, or was slower than the
    operation: then something disturbed its measurement, and it limits nothing."""
    limit = row["limit_gbs"]
    return row["busbw_gbs"] / limit if limit and row["busbw_gbs"] <= limit else None
