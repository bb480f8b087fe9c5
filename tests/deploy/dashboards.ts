// The files of dashboards in Grafana's own types. They name what Grafana has saved: every field, and enums instead of their texts. A file may
// omit fields.
import type { Dashboard, FieldConfig, FieldConfigSource, Panel, RowPanel } from "../clients/environments/node/node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen";
import type * as bargauge from "../clients/environments/node/node_modules/@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen";
import type * as stat from "../clients/environments/node/node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen";
import type * as statetimeline from "../clients/environments/node/node_modules/@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen";
import type * as timeseries from "../clients/environments/node/node_modules/@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen";

type Loose<T> = T extends string ? `${T}` : T extends (infer U)[] ? Loose<U>[] : T extends object ? { [K in keyof T]?: Loose<T[K]> } : T;
type Shown<Type, Options, Custom = Record<string, never>> = Omit<Loose<Panel>, "type" | "options" | "fieldConfig"> & {
  type: Type;
  options: Loose<Options>;
  fieldConfig: Loose<Omit<FieldConfigSource, "defaults">> & { defaults: Omit<Loose<FieldConfig>, "custom"> & { custom?: Loose<Custom> } };
};
type Row = Omit<Loose<RowPanel>, "type"> & { type: "row" };
type Panels =
  | Row
  | Shown<"bargauge", bargauge.Options>
  | Shown<"stat", stat.Options>
  | Shown<"state-timeline", statetimeline.Options, statetimeline.FieldConfig>
  | Shown<"timeseries", timeseries.Options, timeseries.FieldConfig>;
// An annotation of Prometheus has its query beside Grafana's fields.
export type File = Loose<Omit<Dashboard, "annotations" | "panels">> & { annotations: unknown; panels: Panels[] };
