#include "differential/rank_run.h"

#include <optional>

#include "differential/edits.h"

namespace unisono::differential {
namespace {

using at::Tensor;

class RankRun {
 public:
  RankRun(const Case& c, const std::shared_ptr<ProcessGroup>& group)
      : case_(c),
        rank_(static_cast<std::size_t>(group->rank())),
        model_(std::make_shared<RandomModel>(c.model, c.seed + rank_)),
        ddp_(model_, group, c.options),
        parameters_(model_->parameters()),
        sgd_(parameters_, torch::optim::SGDOptions(0.1).momentum(c.momentum ? 0.9 : 0)) {}

  void perform(const Action& action, Snapshot& after) {
    outcomes_ = &after.outcomes;
    switch (action.kind) {
      case Action::Kind::freeze:
      case Action::Kind::unfreeze:
        parameters_[static_cast<std::size_t>(action.parameter)].set_requires_grad(action.kind ==
                                                                                  Action::Kind::unfreeze);
        break;
      case Action::Kind::edit:
        apply_edit(action, parameters_);
        break;
      case Action::Kind::step:
        sgd_.step();
        break;
      case Action::Kind::sync_grads:
        attempt([&] { ddp_.sync_grads(); });
        break;
      case Action::Kind::backward:
        if (action.micros.front().throws != 0) {
          throwing(action.micros.front());
        } else {
          together(action.micros);
        }
    }
    for (const Tensor& p : parameters_) after.gradients.push_back(copy_of(p.grad()));
    if (action.kind == Action::Kind::step) {
      for (const Tensor& p : parameters_) after.parameters.push_back(copy_of(p));
    }
  }

 private:
  template <typename Body>
  void attempt(Body body) {
    outcomes_->emplace_back();
    try {
      body();
    } catch (const std::exception& e) {
      outcomes_->back() = e.what();
    }
  }

  Tensor forward(const Micro& micro, const Call& call) {
    // Half of the time forward stands outside the no_sync block: what counts is where backward is.
    std::optional<NoSync> skip;
    if (!micro.sync && micro.calls[0].data % 2 == 0) skip.emplace(ddp_.core());
    const auto losses = micro.inner ? model_->forward(call) : ddp_(call);
    Tensor loss = losses[micro.side ? 1 : 0];
    if (micro.weighs_early) loss = weighted(micro, loss);
    if (micro.grad_first) {
      std::vector<Tensor> wanted;
      for (const Tensor& p : parameters_) {
        if (p.requires_grad()) wanted.push_back(p);
      }
      torch::autograd::grad({loss}, wanted, {}, /*retain_graph=*/true, /*create_graph=*/false, /*allow_unused=*/true);
    }
    return loss;
  }

  Tensor weighted(const Micro& micro, const Tensor& loss) {
    return micro.weights.empty() ? loss : ddp_.weight(loss, micro.weights[rank_]);
  }

  void backward(const Micro& micro, const Tensor& loss) {
    std::optional<NoSync> skip;
    if (!micro.sync) skip.emplace(ddp_.core());
    for (int b = 0; b < micro.backwards; ++b) {
      attempt([&] {
        const Tensor used = micro.weighs_early ? loss : weighted(micro, loss);
        used.backward({}, /*retain_graph=*/b + 1 < micro.backwards);
      });
    }
  }

  void together(const std::vector<Micro>& micros) {
    std::vector<Tensor> losses;
    for (const Micro& micro : micros) {
      losses.push_back(micro.takes_part[rank_] ? forward(micro, micro.calls[rank_]) : Tensor());
    }
    for (std::size_t i = 0; i < micros.size(); ++i) {
      if (losses[i].defined()) backward(micros[i], losses[i]);
    }
  }

  void once(const Micro& micro, const Call& call) { backward(micro, forward(micro, call)); }

  // What a program does that catches the error and tries again; see reference.cc for what must come of it.
  void throwing(const Micro& micro) {
    const Call& failing = micro.calls[rank_];
    Call good = failing;
    good.throw_in_forward = good.throw_in_backward = -1;
    const bool throws = micro.throws >> rank_ & 1, armed = micro.throws_armed >> rank_ & 1;
    if (micro.throws_in_forward) {
      if (throws) attempt([&] { forward(micro, failing); });
      return once(micro, good);
    }
    const bool told = micro.sync && micro.throws_armed != 0;  // all ranks lose this step
    if (throws) once(micro, failing);
    if ((told && !armed) || (!micro.sync && !throws)) once(micro, good);
    // A lost step has dropped all gradients: zero_grad in place has nothing to do.
    if (told || !micro.sync) model_->zero_grad(/*set_to_none=*/!micro.sync || case_.zero_to_none);
    once(micro, good);
  }

  const Case& case_;
  std::size_t rank_;
  std::shared_ptr<RandomModel> model_;
  DistributedDataParallel<RandomModel> ddp_;
  std::vector<Tensor> parameters_;
  torch::optim::SGD sgd_;
  std::vector<std::string>* outcomes_ = nullptr;
};

}  // namespace

RankRecord run_rank(const Case& c, const std::shared_ptr<ProcessGroup>& group) {
  RankRecord record;
  try {
    RankRun run(c, group);
    for (const Action& action : actions_of(c.program)) {
      record.after.emplace_back();
      run.perform(action, record.after.back());
    }
  } catch (const std::exception& e) {
    record.error = e.what();
    group->abort(
        Error(ErrorCode::internal, "the case has ended on rank " + std::to_string(group->rank()) + ": " + e.what()));
  }
  return record;
}

}  // namespace unisono::differential
