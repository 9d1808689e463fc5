"""Object store tier: keys as objects of S3, GCS, Azure, a folder or memory, through obstore."""

from zinf_storage.object_store.bucket import Bucket, open_bucket
from zinf_storage.object_store.options import Connection, ObjectOptions
from zinf_storage.object_store.tier import FoundObjects, ObjectTier

__all__ = ["Bucket", "Connection", "FoundObjects", "ObjectOptions", "ObjectTier", "open_bucket"]
