"""The one name that is imported."""


def is_flash_attn_greater_or_equal_2_10():
    return True
