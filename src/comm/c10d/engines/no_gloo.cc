#include "comm/c10d/engines/gloo.h"

namespace unisono {

std::string why_no_gloo() {
  return "this library was built without Gloo, for torch brings no headers of it. Install them (Debian: apt-get "
         "install libgloo-dev) and "
         "build again with -DUNISONO_GLOO=ON; or use Python's unisono.init(\"gloo\"), or the transport mpi";
}

c10::intrusive_ptr<c10d::Backend> start_gloo(const EngineStart&) {
  throw Error(ErrorCode::invalid_argument, why_no_gloo());
}

}  // namespace unisono
