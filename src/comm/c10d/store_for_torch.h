#pragma once

#include <c10/util/intrusive_ptr.h>
#include <unisono/make_group.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace unisono {

/// What `make_store` was given; null for a store that did not come from there.
c10::intrusive_ptr<c10d::Store> torch_store_or_null(const Store& store);

/// Any store for torch's engines to meet in: what `make_store` was given, or a c10d store over ours. That one sets,
/// gets, adds, checks and waits; it cannot delete or count keys. Its clones share it: requests of several threads reach
/// `store` one after the other.
c10::intrusive_ptr<c10d::Store> store_for_torch(std::shared_ptr<Store> store);

}  // namespace unisono
