"""The name of a storage service stays with its data directory: samples find their cells by it."""

import pytest

from tq_service.durable.data_dir import DataDir
from tq_service.errors import DataDirError


def opened(path, given, default):
    data_dir = DataDir.open(path)
    try:
        return data_dir.storage_id(given, default)
    finally:
        data_dir.close()


def test_the_first_name_stays_whatever_the_host_is_called_later(tmp_path):
    assert opened(tmp_path, None, "host-50051") == "host-50051"
    assert opened(tmp_path, None, "other-50052") == "host-50051"
    assert opened(tmp_path, "host-50051", "other-50052") == "host-50051"


def test_another_name_is_refused_with_both(tmp_path):
    assert opened(tmp_path, "storage-a", "host-50051") == "storage-a"
    with pytest.raises(DataDirError, match=r"'storage-b'; expected 'storage-a'"):
        opened(tmp_path, "storage-b", "host-50051")
    assert opened(tmp_path, None, "host-50051") == "storage-a"
