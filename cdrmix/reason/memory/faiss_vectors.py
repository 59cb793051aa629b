"""Search of vectors by FAISS: exact, or through an inverted file."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from cdrmix.reason.memory.episode_log import Floats
from cdrmix.reason.memory.vectors import Integers

KIND = f"faiss {faiss.__version__}"
PROBES = 32  # lists that a search reads of an inverted file; it has 4 sqrt(n), as FAISS advises: 1,265 for 100,000


class FaissVectors:
    """Vectors in FAISS's structure.

    sample: keys [n, dim] on which an inverted file is trained; None: exact search. content: the structure to start
    from, as `content()` returned it; None: an empty one.
    """

    def __init__(self, dim: int, sample: Floats | None = None, content: bytes | None = None) -> None:
        self._inverted = sample is not None
        self._index: Any  # FAISS's stubs know neither its parameters' arguments nor what indices have in common
        if content is not None:
            self._index = faiss.deserialize_index(np.frombuffer(content, np.uint8))
        elif sample is None:
            self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        else:
            lists = round(4 * len(sample) ** 0.5)
            self._index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
            self._index.train(sample)  # k-means from a fixed seed

    def content(self) -> bytes:
        """The structure as bytes for a file."""
        content: bytes = faiss.serialize_index(self._index).tobytes()
        return content

    def ids(self) -> Integers:
        """Every id of an inverted file, list by list."""
        lists = self._index.invlists
        parts = [faiss.rev_swig_ptr(lists.get_ids(n), lists.list_size(n)) for n in range(self._index.nlist)]
        return np.concatenate(parts)

    def add(self, ids: Integers, keys: Floats) -> None:
        """See Vectors."""
        self._index.add_with_ids(keys, ids)

    def remove(self, ids: Integers) -> None:
        """See Vectors."""
        self._index.remove_ids(ids)

    def search(self, queries: Floats, count: int, hidden: Integers) -> tuple[Integers, Floats]:
        """See Vectors. With an inverted file it reads PROBES lists."""
        wanted, total = min(count + 1, self._index.ntotal), self._index.ntotal
        parameters = self._parameters(hidden)
        while True:
            scores, ids = self._index.search(queries, wanted, params=parameters)
            # Of equal scores FAISS returns the later ids. If the last returned score equals the first one beyond it,
            # all vectors of that score are needed, to choose the older ones.
            last = min(count, wanted) - 1
            tied = wanted > count and bool(((scores[:, last] == scores[:, -1]) & (ids[:, -1] >= 0)).any())
            if not tied or wanted == total:
                break
            wanted = min(2 * wanted, total)
        order = np.lexsort((ids, -scores))
        ids, scores = np.take_along_axis(ids, order, 1)[:, :count], np.take_along_axis(scores, order, 1)[:, :count]
        return ids, scores

    def _parameters(self, hidden: Integers) -> Any:
        """The search parameters, which exclude the hidden ids."""
        selector = faiss.IDSelectorNot(faiss.IDSelectorBatch(hidden)) if len(hidden) else None
        exact: Any = faiss.SearchParameters
        inverted: Any = faiss.SearchParametersIVF
        if self._inverted:
            return inverted(nprobe=PROBES, sel=selector)
        return exact(sel=selector) if selector is not None else None
